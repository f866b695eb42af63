"""The error about something that a file asks for and recipes cannot express."""

from collections.abc import Mapping

from ligerprof.errors import UnsupportedError
from ligerprof.recipe.configs.settings import Found, Lacking, Setting
from ligerprof.recipe.training import RECIPE_OPTIONS

# last sentences of errors about files whose key cannot be taken out without changing what is trained
OTHER_METHOD = "Only supervised fine-tuning is covered; `ligerprof run -- COMMAND` measures other training."
OTHER_TRAINING = "`ligerprof run -- COMMAND` measures this training."
NO_TRAINING = "Give the configuration of a training run."
# what cannot be estimated runs there as it is
SIMULATED_RANKS = "`ligerprof run --device simulated --world N -- COMMAND` runs its ranks without GPUs."
# the setting's option on the command line, where it has another name
_OPTIONS: Mapping[Setting, str] = {
    Setting.WEIGHTS: "precision",
    Setting.AUTOCAST: "precision",
    Setting.RANK: "lora",
    Setting.BITS: "lora",
    Setting.LORA_TARGETS: "lora",
}


def refusal(found: Found, lacking: Lacking) -> UnsupportedError:
    """The error: where, what, and what to do."""
    name = None if lacking.setting is None else _OPTIONS.get(lacking.setting, lacking.setting.value)
    declared = RECIPE_OPTIONS.get(name or "")
    remedy = lacking.remedy or (
        f"Choose another with {declared.flag}." if declared else "Take the key out to leave it out of the figures."
    )
    if lacking.what.endswith("parallelism"):
        remedy = f"{SIMULATED_RANKS} {remedy}"
    return UnsupportedError(f"{found.place}: {lacking.what} is not supported yet. {remedy}")
