"""What configuration files set, in words that all frameworks share, and what became of each of their keys."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ligerprof.errors import UnsupportedError
from ligerprof.recipe.training import RECIPE_OPTIONS
from ligerprof.text import short_repr
from ligerprof.words import ExplainedWord, Word

# LoRA's layers if a file names none: what peft adapts depends on the model
PEFT_DEFAULT = "peft's default"
# modules that are trained in full next to adapters: embedding and head, whose names depend on the model
EMBEDDING_AND_HEAD = "embedding and head"
# the method of every recipe: supervised fine-tuning, or pretraining, of a causal language model
SUPERVISED = "sft"


class Setting(Word):
    """What a key can set. A setting with the name of a recipe option sets that option."""

    MODEL = "model"
    BATCH = "batch"
    SEQ = "seq"
    GRAD_ACCUM = "grad_accum"
    LIGER = "liger"
    PROVIDER = "provider"
    CHECKPOINTING = "checkpointing"
    CHECKPOINT_EVERY = "checkpoint_every"
    SELECTIVE = "selective"
    REENTRANT = "reentrant"
    OPTIMIZER = "optimizer"
    FP32_EMBEDDING_STATES = "fp32_embedding_states"
    GALORE_RANK = "galore_rank"
    CLIP = "clip"
    ATTENTION = "attention"
    EXPERTS = "experts"
    LOSS = "loss"
    ENGINE = "engine"
    ZERO = "zero"
    OFFLOAD = "offload"
    NVME_PATH = "nvme_path"
    GPUS = "gpus"
    PACKING = "packing"
    COMPILE = "compile"
    ACTIVATION_OFFLOAD = "activation_offload"
    DORA = "dora"
    LORA_DROPOUT = "lora_dropout"
    LORA_TARGETS = "lora_targets"
    ADAPTER_DTYPE = "adapter_dtype"
    NESTED_QUANT = "nested_quant"
    MODULES_TO_SAVE = "modules_to_save"
    FP32_SAVED_MODULES = "fp32_saved_modules"
    RESHARD = "reshard"
    REPLICATE = "replicate"
    WRAP = "wrap"
    REDUCE_DTYPE = "reduce_dtype"
    SAVE_WHOLE = "save_whole"
    GRAD_SYNC = "grad_sync"
    BACKWARD_PREFETCH = "backward_prefetch"
    LENGTH_ORDER = "length_order"
    PAD_TO_MULTIPLE_OF = "pad_to_multiple_of"
    # settings from which options are derived
    EVALUATES = "evaluation"
    EVALUATION_BATCH = "evaluation_batch"
    WEIGHTS = "weights"
    AUTOCAST = "autocast"
    RANK = "rank"
    BITS = "bits"
    DEEPSPEED = "deepspeed"
    TRAIN_BATCH = "train_batch"
    # the engine of several GPUs, in files that train on one as well
    SEVERAL = "several"


class Packing(ExplainedWord):
    """How a file packs sequences: the values of Setting.PACKING."""

    DOCUMENTS = "documents", "each row holds several documents, which positions keep apart"
    PADDING_FREE = "padding-free", "the sequences of a micro-batch are joined to one row without padding"
    MASK = "mask", "each row holds several documents; without flash attention, rows stay apart and have a mask"
    ROWS = "rows", "each row holds several documents, which positions keep apart; rows stay apart"
    VARLEN = "varlen", "as rows, but sdpa is torch's varlen attention where the model has no sliding window"
    PADDED = "padded", "each row is filled with documents that see each other, and padded; rows stay apart"
    PLAIN = "plain", "each row is filled with tokens, and documents see each other"


# names the router of a mixture of experts
ROUTER = "router"


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptOutputs:
    """A value of Setting.SELECTIVE whose shapes depend on the model: a policy's name or operators.

    Products of linear layers that `recomputed` names by their ends, or as `ROUTER`, are not kept.
    """

    policy: str
    recomputed: tuple[str, ...] = ()


class Reason(ExplainedWord):
    """Why a key has no effect on the memory of a training step."""

    UNSET = "unset", "null, or a value that switches the feature off"
    DATA = "data", "which data is read and how it is prepared on the CPU"
    SCHEDULE = "schedule", "learning rate, and how long training runs"
    NUMBER = "number", "a factor in the formula of the loss, the optimizer or the adapter"
    LOADING = "loading", "how weights and code are fetched before the first step"
    OUTPUT = "output", "logs, trackers, reports and the hub"
    SAVING = "saving", "when and how checkpoints are written"
    LAUNCH = "launch", "how processes start and find each other"
    RANDOM = "random", "seeds and determinism"
    GENERATION = "generation", "text generation and inference"
    CHECKS = "checks", "checks and debugging"
    SPEED = "speed", "speed, with the same tensors in memory"
    EVALUATION = "evaluation", "when evaluation runs and what it reports; its batch size is read"
    OTHER_METHOD = "other method", "a number of a method that this file does not use"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sets:
    """The key sets these settings; `words` say it for a key whose meaning depends on others."""

    values: Mapping[Setting, Any]
    words: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """The key names another configuration file, of the framework `framework`."""

    file: str
    framework: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ignored:
    """The key has no effect on the memory of a training step."""

    reason: Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """The key has an effect that the figures do not include: `what`, as in `evaluation`."""

    what: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Lacking:
    """The key asks for something that recipes cannot express.

    Attributes:
        what: the missing feature, such as `tensor parallelism`.
        setting: the setting whose option on the command line replaces the key, or None.
        remedy: what to do instead, if there is more to say than to remove the key.
    """

    what: str
    setting: Setting | None = None
    remedy: str = ""


Outcome = Sets | Names | Ignored | LeftOut | Lacking


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A value of a setting, or a `Lacking`, and the file and key that it comes from; a flag has no file."""

    value: Any
    key: str
    file: str

    @property
    def place(self) -> str:
        """File and key, for messages."""
        return f"{self.file}: {self.key}" if self.file else self.key


@dataclass(kw_only=True)
class Reading:
    """One file, read: what its keys set, and what became of each.

    Attributes:
        file: the file, as the user named it.
        framework: whose file it is, such as `axolotl`.
        settings: what keys set.
        options: values of recipe options, by name, from a recipe of ours; of those that are not settings.
        defaults: the framework's own values of settings that no file mentions.
        read: what each key set, in words.
        ignored: keys without effect on memory, each with the reason.
        left_out: keys whose effect the figures do not include, each with what that is.
        unknown: keys that the framework's table does not contain.
        lacking: features that recipes cannot express and no option replaces.
        assumed: what reading the file assumed, one sentence each.
        files: other configuration files that the file names, by key.
        is_complete: see `Framework`.
        method: what is trained; None if the file does not say, and is counted as supervised fine-tuning.
    """

    file: str
    framework: str
    is_complete: bool = True
    settings: dict[Setting, Found] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    defaults: dict[Setting, Any] = field(default_factory=dict)
    read: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, Reason] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    lacking: list[Found] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    files: dict[str, Names] = field(default_factory=dict)
    method: str | None = SUPERVISED

    def note(self, key: str, value: Any, outcome: Outcome) -> None:
        """File the outcome of a key."""
        if isinstance(outcome, Ignored):
            self.ignored[key] = outcome.reason
        elif isinstance(outcome, LeftOut):
            self.left_out[key] = outcome.what
        elif isinstance(outcome, Lacking):
            place = key if value is None or isinstance(value, (dict, list)) else f"{key}: {short_repr(value)}"
            found = Found(value=outcome, key=place, file=self.file)
            if outcome.setting is None:
                self.lacking.append(found)
            else:
                self.settings[outcome.setting] = found
            self.read[key] = f"{outcome.what}: not supported"
        elif isinstance(outcome, Names):
            self.files[key] = outcome
            self.read[key] = f"the file {outcome.file}"
        else:
            self.set(key, outcome.values, words=outcome.words)

    def set(self, key: str, values: Mapping[Setting, Any], *, words: str = "") -> None:
        """Record what a key sets."""
        self.imply(key, values)
        self.read[key] = words or ", ".join(f"{setting} {_shown(value)}" for setting, value in values.items())

    def imply(self, key: str, values: Mapping[Setting, Any]) -> None:
        """Record what a key sets next to what it is read as."""
        self.settings |= {setting: Found(value=value, key=key, file=self.file) for setting, value in values.items()}

    def lack(self, key: str, what: str, *, setting: Setting | None = None, remedy: str = "", value: Any = None) -> None:
        """Record that a key asks for something that recipes cannot express; see `Lacking`."""
        self.note(key, value, Lacking(what=what, setting=setting, remedy=remedy))

    def without(self, key: str) -> None:
        """Take back what a key and the keys of its section say: the feature that reads them is off."""

        def is_inside(name: str) -> bool:
            return name == key or name.startswith((f"{key}.", f"{key}:"))

        inside = [name for name in (*self.read, *self.left_out, *self.files) if is_inside(name)]
        self.settings = {setting: found for setting, found in self.settings.items() if not is_inside(found.key)}
        self.lacking = [found for found in self.lacking if not is_inside(found.key)]
        for name in inside:
            for kept in (self.read, self.left_out, self.files):
                kept.pop(name, None)
            self.ignored[name] = Reason.OTHER_METHOD

    def value(self, setting: Setting) -> Any:
        """The value of a setting in this file, else the framework's default, else None; None if lacking."""
        found = self.settings.get(setting)
        value = found.value if found is not None else self.defaults.get(setting)
        return None if isinstance(value, Lacking) else value


def default_key(setting: Setting, framework: str) -> str:
    """The key of a value that no file sets, and that the framework has by default."""
    return f"{setting} ({framework}'s default)"


def defaults_of(readings: Sequence[Reading]) -> dict[Setting, Found]:
    """Values of settings that no file mentions: those of the last complete file, else of all others."""
    complete = [reading for reading in readings if reading.is_complete]
    return {
        setting: Found(value=value, key=default_key(setting, reading.framework), file=reading.file)
        for reading in complete[-1:] or readings
        for setting, value in reading.defaults.items()
    }


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Mapping):
        return f"of {len(value)} keys"
    if isinstance(value, (list, frozenset)):
        return "+".join(sorted(map(str, value)))[:60]
    return str(value)[:60]


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
    what = f"{lacking.what} is not supported yet"
    return UnsupportedError(f"{found.place}: {what}. {remedy}", what)
