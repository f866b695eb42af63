"""What DeepSpeed is configured with, in runs and in the closed form alike, and what a user may change in it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ligerprof.errors import RecipeError
from ligerprof.files import FileKind, parse_object, read_json
from ligerprof.recipe.categories import Offload, Optimizer, Precision
from ligerprof.recipe.training_options import TrainingOptions
from ligerprof.text import short_repr

Config = Mapping[str, Any]

# sizes in elements; DeepSpeed's own defaults, but for overlap_comm
ZERO_SETTINGS: Config = {
    "overlap_comm": False,
    "contiguous_gradients": True,
    "reduce_bucket_size": 500_000_000,
    "allgather_bucket_size": 500_000_000,
    "sub_group_size": 1_000_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
}
# 2**8: a scale that random weights do not overflow, so that the measured steps are taken and not skipped
_INITIAL_SCALE_POWER = 8
_NEVER = 2**31
_LARGEST_NUMBER = 2**63
_FILE = FileKind(error=RecipeError, hint="--deepspeed-config names a JSON file of DeepSpeed's.", max_bytes=2**20)
# what the recipe decides, by the option that decides it
_OPTIONS: Mapping[str, str] = {
    "train_micro_batch_size_per_gpu": "--batch",
    "gradient_accumulation_steps": "--grad-accum",
    "train_batch_size": "--batch times --grad-accum times --gpus",
    "gradient_clipping": "--clip",
    "fp16.enabled": "--precision",
    "bf16.enabled": "--precision",
    "zero_optimization.stage": "--zero",
    "zero_optimization.offload_optimizer.device": "--offload",
    "zero_optimization.offload_optimizer.nvme_path": "--nvme-path",
    "zero_optimization.offload_param.device": "--offload",
    "zero_optimization.offload_param.nvme_path": "--nvme-path",
}
# sections that recipes do not take from the file: the recipe has the optimizer, and a schedule holds no memory
_REFUSED: Mapping[str, str] = {
    "optimizer": "--optimizer chooses the optimizer",
    "scheduler": "a learning rate holds no memory",
}


def read_deepspeed_config(source: str | Config) -> Config:
    """Take a user's configuration without values that say `auto`; raises RecipeError if it is not a JSON object.

    Args:
        source: a JSON file, its text, or the object in it.
    """
    if isinstance(source, str):
        is_text = source.lstrip().startswith("{")
        source = parse_object(source, "--deepspeed-config", _FILE) if is_text else read_json(Path(source), _FILE)
    plain: Config = _plain(source)
    return plain


def deepspeed_config(recipe: TrainingOptions) -> dict[str, Any]:
    """DeepSpeed's configuration of a recipe with the user's laid over it; raises RecipeError where they disagree."""
    ours, theirs = _own_config(recipe), read_deepspeed_config(recipe.deepspeed_config or {})
    _require_kinds(ours, theirs)
    _require_agreement(dict(leaves(ours)), theirs)
    return _merged(ours, theirs)


def zero_settings(recipe: TrainingOptions) -> Config:
    """The `zero_optimization` section of a recipe's configuration."""
    section: Config = deepspeed_config(recipe)["zero_optimization"]
    return section


def _own_config(recipe: TrainingOptions) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": recipe.batch,
        "gradient_accumulation_steps": recipe.grad_accum,
        "train_batch_size": recipe.batch * recipe.grad_accum * recipe.gpus,
        "gradient_clipping": recipe.clip or 0.0,
        "fp16": {"enabled": recipe.precision is Precision.MIXED_FP16, "initial_scale_power": _INITIAL_SCALE_POWER},
        "bf16": {"enabled": recipe.precision is Precision.MIXED},
        "zero_optimization": {"stage": recipe.zero, **ZERO_SETTINGS, **_offload_sections(recipe)},
        # sgd and torch's own AdamW are as good as DeepSpeed's for what a step holds
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": recipe.optimizer is Optimizer.DEEPSPEED_CPU_ADAM,
        "steps_per_print": _NEVER,
    }


def _offload_sections(recipe: TrainingOptions) -> dict[str, Any]:
    # asynchronous reads and writes of a disk need page-locked buffers
    place: dict[str, Any] = {"device": recipe.offload.device, "pin_memory": recipe.offload is Offload.NVME}
    if recipe.nvme_path is not None:
        place["nvme_path"] = recipe.nvme_path
    sections = {"offload_optimizer": place}
    if recipe.zero == 3:
        moved = place if recipe.offload.moves_parameters else {"device": "none"}
        sections["offload_param"] = {**moved, **_nvme_buffers(recipe)}
    return sections


def _nvme_buffers(recipe: TrainingOptions) -> dict[str, int]:
    """A buffer takes one parameter: it has to be as large as the largest."""
    if recipe.offload is not Offload.NVME:
        return {}
    largest = max(parameter.elements for parameter in recipe.spec.parameters)
    return {"buffer_count": 5, "buffer_size": -(-largest // recipe.gpus)}


def _require_agreement(ours: Config, theirs: Config) -> None:
    for section, reason in _REFUSED.items():
        if section in theirs:
            raise RecipeError(f"--deepspeed-config: take the section {section!r} out; {reason}.")
    for key, value in leaves(theirs):
        if key in _OPTIONS and value != ours.get(key, value):
            raise RecipeError(
                f"--deepspeed-config: {key} is {short_repr(value)}, {_OPTIONS[key]} says {ours[key]!r}."
                " Make them agree."
            )


def _require_kinds(ours: Config, theirs: Config, path: str = "") -> None:
    """Objects where ours has objects, numbers where it has numbers: the closed form calculates with some."""
    for key, value in theirs.items():
        own = ours.get(key, value)
        if isinstance(own, Mapping) and isinstance(value, Mapping):
            _require_kinds(own, value, f"{path}{key}.")
        elif _kind(own) != _kind(value):
            raise RecipeError(f"--deepspeed-config: {path}{key} is {short_repr(value)}. Give it {_kind(own)}.")
        # as DeepSpeed's own check (deepspeed/runtime/zero/config.py)
        elif key in ZERO_SETTINGS and isinstance(value, (int, float)) and value < 0:
            raise RecipeError(f"--deepspeed-config: {path}{key} is {short_repr(value)}. Give it 0 or more.")


def _kind(value: Any) -> str:
    if isinstance(value, (int, float)) and not abs(value) < _LARGEST_NUMBER:
        return "a finite number"
    kinds = ((Mapping, "an object"), (bool, "true or false"), ((int, float), "a number"), (str, "a text"))
    return next((kind for types, kind in kinds if isinstance(value, types)), "something else")


def leaves(values: Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every scalar value, by its dotted path."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _merged(ours: Config, theirs: Config) -> dict[str, Any]:
    both = (key for key, value in theirs.items() if isinstance(value, Mapping) and isinstance(ours.get(key), Mapping))
    return {**ours, **theirs, **{key: _merged(ours[key], theirs[key]) for key in both}}


def _plain(value: Any) -> Any:
    """Without `auto`; 5e8, as DeepSpeed's documentation writes sizes, as the whole number it is."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if item != "auto"}
    return int(value) if isinstance(value, float) and value.is_integer() else value
