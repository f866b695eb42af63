"""Write a change of a recipe into the files that the recipe comes from: their own keys, on their own lines."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ligerprof.errors import OutputError, RecipeError
from ligerprof.files import FileKind, is_file, read_text
from ligerprof.recipe.categories import Engine, Offload, Precision
from ligerprof.recipe.configs.accelerate import ACCELERATE
from ligerprof.recipe.configs.axolotl import AXOLOTL
from ligerprof.recipe.configs.deepspeed import DEEPSPEED
from ligerprof.recipe.configs.documents import parse_document, rewrite, value_at, with_values
from ligerprof.recipe.configs.llama_factory import LLAMA_FACTORY
from ligerprof.recipe.configs.resolve import load_options
from ligerprof.recipe.configs.rows import Spelling
from ligerprof.recipe.configs.sources import BY_NAME, is_function, read_named
from ligerprof.recipe.configs.torchtitan import CLASS, FUNCTION_WRITES, TORCHTITAN, values_of_function
from ligerprof.recipe.configs.torchtitan import SECTION as CHECKPOINTING
from ligerprof.recipe.configs.trainer import TRANSFORMERS
from ligerprof.recipe.configs.trl import TRL_SFT
from ligerprof.recipe.deepspeed import zero_settings
from ligerprof.recipe.training import RECIPE_OPTIONS, TrainingRecipe

_FILE = FileKind(error=RecipeError, hint="--config names the file to edit.", max_bytes=2**18)
# what frameworks take where a file has no such key
_DEFAULTS: Mapping[str, Any] = {
    "dtype": "float32",
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "training.enable_cpu_offload"), False),
    **dict.fromkeys(("fsdp_config.fsdp_offload_params", "fsdp_config.offload_params"), False),
    **dict.fromkeys(("fsdp_config.fsdp_reshard_after_forward", "fsdp_config.reshard_after_forward"), True),
    **dict.fromkeys(("deepspeed_config.offload_optimizer_device", "deepspeed_config.offload_param_device"), "none"),
    "deepspeed_config.zero3_init_flag": False,
    "parallelism.data_parallel_replicate_degree": 1,
    "parallelism.fsdp_reshard_after_forward": "default",
}
_LAUNCHER, _DEEPSPEED = ACCELERATE.name, DEEPSPEED.name
_SECTION = "deepspeed_config."
# the Trainer counts its own micro-batches, and ends if DeepSpeed's settings have another number
_IN_BOTH = "grad_accum"
EDITABLE = "transformers, TRL, axolotl, LLaMA-Factory, torchtitan, accelerate or DeepSpeed"


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyChange:
    """One key of a file and its new value; `old` is None for a key that the file does not have.

    Attributes:
        key: a dot separates a section from its key.
        differences: of a new value with sections, the parts that the old one, or the file that it names, does not
            have; else the new value.
    """

    key: str
    old: Any
    new: Any
    differences: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEdit:
    """A configuration file that says another recipe.

    Attributes:
        file: the file that was edited, or the function; it is not written.
        changes: the keys that change, in the order of recipe options.
        missing: options that change and for which the file has no key, by name, with the option as typed.
        text: the text of the file before the change; None for a function, which is code.
        values: what the file says after it.
    """

    file: str
    changes: tuple[KeyChange, ...]
    missing: Mapping[str, str]
    text: str | None
    values: Mapping[str, Any]

    @property
    def content(self) -> str | None:
        """The text after the change, comments included; None for a function. Raises RecipeError as `rewrite`."""
        if self.text is None:
            return None
        return rewrite(self.text, Path(self.file), {change.key: change.new for change in self.changes})

    @property
    def not_in_file(self) -> tuple[str, ...]:
        """Options that change, as typed, for which the file has no key."""
        return tuple(self.missing.values())

    @property
    def lines(self) -> Iterator[str]:
        """The changed lines: what leaves the file after `-`, what comes after `+`."""
        equals = ": " if self.text is not None and not self.file.endswith(".toml") else " = "
        for change in self.changes:
            old = change.old
            if self.text is None and isinstance(old, Mapping):
                # an object of a function
                old = old.get(CLASS, old)
            if old is not None:
                yield f"- {change.key}{equals}{json.dumps(old)}"
            kept = "the rest as before, and " if change.differences != change.new else ""
            yield f"+ {change.key}{equals}{kept}{json.dumps(change.differences)}"
        if self.text is None and self.changes:
            yield f"{self.file} is a Python function: set these values in it; ligerprof does not rewrite code."

    def to_json(self) -> dict[str, Any]:
        """The value of `edit` in JSON results."""
        changes = [{"key": change.key, "old": change.old, "new": change.new} for change in self.changes]
        return {"file": self.file, "changes": changes, "not_in_file": list(self.not_in_file)}


def _writes(framework: str) -> Mapping[str, Spelling] | None:
    known = BY_NAME.get(framework)
    return None if known is None else known.writes


def keys_for(framework: str, **changes: Any) -> dict[str, Any] | None:
    """The keys of a framework, by name, for changed options of any recipe; None without a key for each of them."""
    recipe, writes = TrainingRecipe(model="tiny", **changes), _writes(framework) or {}
    found = [writes[name](recipe) if name in writes else None for name in changes]
    keys = [each for each in found if each is not None]
    return {key: value for each in keys for key, value in each.items()} if len(keys) == len(found) else None


def can_edit(file: str, framework: str) -> bool:
    """Whether `edit_file` has keys for a file of this framework."""
    if _writes(framework) is None:
        return False
    if framework == TORCHTITAN.name:
        return is_function(file) or Path(file).suffix.lower() == ".toml"
    return Path(file).suffix.lower() != ".toml" and is_file(file)


def switch_liger(files: Sequence[tuple[str, str]]) -> bool:
    """Whether `edit_files` can switch fused kernels on in one of the files, as each framework does: liger-kernel's."""
    return any(can_edit(*each) and "liger" in (_writes(each[1]) or {}) for each in files)


def edit_files(files: Sequence[tuple[str, str]], before: TrainingRecipe, after: TrainingRecipe) -> tuple[FileEdit, ...]:
    """Change the files that describe a recipe: each option in the first of them that has a key for it.

    Where a file of accelerate is among them, it decides how the model is sharded, or DeepSpeed's JSON that it names,
    and the number of micro-batches per step goes to the trainer's file, too. Returns an edit per file that can be
    edited; `missing` of each is what no file has a key for.
    """
    editable = [each for each in files if can_edit(*each)]
    launched = any(framework == _LAUNCHER for _, framework in files)
    left = _changed(before, after)
    edits = []
    for file, framework in sorted(editable, key=lambda each: each[1] not in (_LAUNCHER, _DEEPSPEED) if launched else 0):
        shards = not launched or framework in (_LAUNCHER, _DEEPSPEED)
        edit = edit_file(file, framework, before, after, shards=shards, options=left)
        edits.append(edit)
        left = [name for name in left if name in edit.missing or (name == _IN_BOTH and framework == _LAUNCHER)]
    missing = edits[-1].missing if edits else {}
    order = {file: number for number, (file, _) in enumerate(editable)}
    return tuple(replace(edit, missing=missing) for edit in sorted(edits, key=lambda edit: order[edit.file]))


def edit_file(
    file: str,
    framework: str,
    before: TrainingRecipe,
    after: TrainingRecipe,
    *,
    shards: bool = True,
    options: Collection[str] | None = None,
) -> FileEdit:
    """Change the keys of a file from one recipe to another; raises RecipeError if it cannot be read.

    Args:
        shards: whether this file decides how the model is sharded, rather than one of accelerate.
        options: the options to change in this file; None: all that differ.
    """
    spellings = _writes(framework) or {}
    text = None
    if is_function(file):
        values, spellings = values_of_function(file), FUNCTION_WRITES
    else:
        text = read_text(Path(file), _FILE)
        values = parse_document(text, Path(file))
    changes: dict[str, KeyChange] = {}
    missing: dict[str, str] = {}
    sharding = _sharding_keys(file, framework, values, after) if shards else _NO_KEYS
    # accelerate takes no settings of DeepSpeed next to the JSON that it names
    names_json = value_at(values, f"{_SECTION}deepspeed_config_file") is not None
    for name in _changed(before, after) if options is None else options:
        spelling = spellings.get(name)
        keys = sharding.keys if name in sharding.options else spelling(after) if spelling is not None else None
        if keys is None or (names_json and any(key.startswith(_SECTION) for key in keys)):
            declared, value = RECIPE_OPTIONS[name], getattr(after, name)
            missing[name] = f"no {declared.flag}" if value is None else " ".join(declared.typed(value))
            continue
        for key, value in keys.items():
            old = value_at(values, key)
            # a section of DeepSpeed or FSDP2 is whole
            new = value if name in sharding.options else _joined(old, value)
            is_same = old == new or (old is None and key in _DEFAULTS and new == _DEFAULTS[key])
            if not is_same and key not in changes:
                differences = _differences(sharding.before.get(key, old), new)
                changes[key] = KeyChange(key=key, old=old, new=new, differences=differences)
    edited = {key: change.new for key, change in changes.items()}
    if text is None and isinstance(chosen := edited.get(CHECKPOINTING), str):
        # the class of torchtitan
        edited[CHECKPOINTING] = {CLASS: chosen}
    said = with_values(values, edited)
    return FileEdit(file=file, changes=tuple(changes.values()), missing=missing, text=text, values=said)


def _changed(before: TrainingRecipe, after: TrainingRecipe) -> list[str]:
    """The options that differ; the provider of kernels goes with their switch."""
    names = [name for name in RECIPE_OPTIONS if getattr(before, name) != getattr(after, name)]
    return [name for name in names if name != "provider"]


def _differences(old: Any, new: Any) -> Any:
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return new
    return {key: _differences(old.get(key), value) for key, value in new.items() if old.get(key) != value}


def _joined(old: Any, new: Any) -> Any:
    """A list is added to the one that the file has, and a section's keys to the others in it."""
    if isinstance(new, Mapping) and isinstance(old, Mapping):
        return {**old, **new}
    if isinstance(new, list) and isinstance(old, list):
        return [*old, *(item for item in new if item not in old)]
    return new


def require_editable(files: Sequence[tuple[str, str]]) -> None:
    """Raise OutputError if no --config file can be rewritten; `files` are those of the recipe."""
    editable = [file for file, framework in files if can_edit(file, framework)]
    if editable and all(map(is_function, editable)):
        raise OutputError(
            f"{editable[0]} is a Python function, and ligerprof does not rewrite code."
            " Ask for no copy: the values to set in it are printed."
        )
    if not editable:
        raise OutputError(f"A changed copy needs a --config file of {EDITABLE}. Give one.")


def edits_json(edits: Sequence[FileEdit]) -> dict[str, Any]:
    """The keys of JSON results: `edit` is the first file that changes, and `edits` are all if there are several."""
    if not edits:
        return {}
    first = next((edit for edit in edits if edit.changes), edits[0])
    several = {"edits": [edit.to_json() for edit in edits]} if len(edits) > 1 else {}
    return {"edit": first.to_json(), **several}


# what DeepSpeed's settings say of a recipe
_OPTIONS = ("engine", "zero", "offload", "nvme_path", "deepspeed_config", "bucket_view", "grad_sync")
_AUTO = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
# keys of the Trainer for the precisions in which DeepSpeed trains; "auto" is axolotl's
_PRECISIONS = {Precision.MIXED: "bf16", Precision.MIXED_FP16: "fp16"}
_ON = (True, "true", "auto")
_INLINE = tuple(each.name for each in (TRANSFORMERS, TRL_SFT, AXOLOTL, LLAMA_FACTORY))
# what FSDP2's settings say of a recipe
_FSDP_OPTIONS = ("engine", "offload", "reshard", "wrap", "reduce_dtype", "zero", "bucket_view")
_WRAP = "TRANSFORMER_BASED_WRAP"


class _ShardingKeys(NamedTuple):
    """Keys that make a file train as a recipe does, the options that they decide, and the values that they replace."""

    keys: Mapping[str, Any]
    options: frozenset[str]
    before: Mapping[str, Any]


_NO_KEYS = _ShardingKeys({}, frozenset(), {})


def _sharding_keys(file: str, framework: str, values: Mapping[str, Any], recipe: TrainingRecipe) -> _ShardingKeys:
    """The keys of a file for a recipe that trains with DeepSpeed or FSDP2; none for other recipes.

    A file that names DeepSpeed's JSON gets its content, changed, under the same key; one of accelerate leaves that to
    the JSON.
    """
    if recipe.engine is Engine.FSDP2:
        return _fsdp2_keys(framework, recipe)
    if recipe.engine is not Engine.DEEPSPEED or recipe.precision not in _PRECISIONS:
        return _NO_KEYS
    decided = {*_OPTIONS, *(() if recipe.offload is Offload.NONE else ("optimizer",))}
    if framework == _DEEPSPEED:
        zero = _zero(values.get("zero_optimization"), recipe)
        return _ShardingKeys({"zero_optimization": zero}, frozenset(decided), values)
    if framework == _LAUNCHER:
        return _launched_deepspeed(values, recipe, frozenset({*decided, "precision"}))
    if framework not in _INLINE:
        return _NO_KEYS
    old = values.get("deepspeed")
    if isinstance(old, str):
        old, _ = read_named(file, framework, "deepspeed", old)
    section = dict(old) if isinstance(old, Mapping) else {}
    precision = _PRECISIONS[recipe.precision]
    for key in _AUTO:
        section.setdefault(key, "auto")
    section.setdefault(precision, {"enabled": "auto"})
    if recipe.offload is not Offload.NONE:
        # DeepSpeed's Adam on the CPU
        section.setdefault("optimizer", {"type": "AdamW", "params": dict.fromkeys(_ADAM, "auto")})
    section["zero_optimization"] = _zero(section.get("zero_optimization"), recipe)
    keys: dict[str, Any] = {"deepspeed": section}
    if values.get(precision) not in _ON:
        keys[precision] = True
    return _ShardingKeys(keys, frozenset({*decided, "precision"}), {**values, "deepspeed": old})


def _launched_deepspeed(values: Mapping[str, Any], recipe: TrainingRecipe, options: frozenset[str]) -> _ShardingKeys:
    section = values.get("deepspeed_config")
    if isinstance(section, Mapping) and "deepspeed_config_file" in section:
        return _NO_KEYS
    place = recipe.offload.device if recipe.offload is not Offload.NONE else "none"
    settings: dict[str, Any] = {
        "zero_stage": recipe.zero,
        "offload_optimizer_device": place,
        "offload_param_device": place if recipe.offload.moves_parameters else "none",
        "zero3_init_flag": recipe.zero == 3,
    }
    if recipe.nvme_path is not None:
        settings |= {f"offload_{part}_nvme_path": recipe.nvme_path for part in ("optimizer", "param")}
    keys = {
        "distributed_type": "DEEPSPEED",
        "mixed_precision": _PRECISIONS[recipe.precision],
        **{f"deepspeed_config.{key}": value for key, value in settings.items()},
    }
    return _ShardingKeys(keys, options, {})


def _fsdp2_keys(framework: str, recipe: TrainingRecipe) -> _ShardingKeys:
    if recipe.precision is not Precision.MIXED or (recipe.replicate > 1 and framework != TORCHTITAN.name):
        return _NO_KEYS
    offloads = recipe.offload is not Offload.NONE
    options = frozenset({*_FSDP_OPTIONS, "precision"})
    if framework == TORCHTITAN.name:
        keys: dict[str, Any] = {
            "parallelism.data_parallel_shard_degree": recipe.gpus // recipe.replicate,
            "parallelism.data_parallel_replicate_degree": recipe.replicate,
            "parallelism.fsdp_reshard_after_forward": "default" if recipe.reshard else "never",
            "training.enable_cpu_offload": offloads,
        }
        return _ShardingKeys(keys, options | {"replicate"}, {})
    settings = {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": _WRAP,
        "fsdp_reshard_after_forward": recipe.reshard,
        "fsdp_offload_params": offloads,
    }
    if framework == _LAUNCHER:
        keys = {"distributed_type": "FSDP", "mixed_precision": "bf16", **_in_section(settings)}
    elif framework == AXOLOTL.name:
        plain = {key.removeprefix("fsdp_"): value for key, value in settings.items() if key != "fsdp_version"}
        keys = {"fsdp_version": 2, "bf16": True, **_in_section(plain)}
    elif framework in _INLINE:
        # the Trainer wraps and offloads by the words of `fsdp`
        words = f"full_shard auto_wrap{' offload' if offloads else ''}"
        plain = {"version": 2, "reshard_after_forward": recipe.reshard}
        keys = {"fsdp": words, "bf16": True, **_in_section(plain)}
    else:
        return _NO_KEYS
    return _ShardingKeys(keys, options, {})


def _in_section(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {f"fsdp_config.{key}": value for key, value in settings.items()}


_ADAM = ("lr", "betas", "eps", "weight_decay")


def _zero(old: Any, recipe: TrainingRecipe) -> dict[str, Any]:
    section = dict(old) if isinstance(old, Mapping) else {}
    section["stage"] = recipe.zero
    # DeepSpeed's own default depends on the stage
    section.setdefault("overlap_comm", zero_settings(recipe)["overlap_comm"])
    place: dict[str, Any] = {"device": recipe.offload.device}
    if recipe.nvme_path is not None:
        place["nvme_path"] = recipe.nvme_path
    for name, moves in (
        ("offload_optimizer", recipe.offload is not Offload.NONE),
        ("offload_param", recipe.offload.moves_parameters),
    ):
        inner = section.pop(name, None)
        if moves:
            section[name] = {**(inner if isinstance(inner, Mapping) else {}), **place}
    return section


# frameworks whose files are a whole training run, without a program of the user's
_SELF_CONTAINED = frozenset(each.name for each in (TRL_SFT, AXOLOTL, LLAMA_FACTORY, TORCHTITAN))
# variables of the environment, which no file sets
_OUTSIDE = frozenset({"alloc_conf"})
_KERNELS = frozenset({"liger", "provider"})
# options that frameworks derive from others: a plan has them from the files, and no change asks for them
_DERIVED = frozenset({"save_whole", "fp32_embedding_states"})


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenPlan:
    """What changed files say, with the options for which they have no key, and the edits, which list these."""

    recipe: TrainingRecipe
    edits: tuple[FileEdit, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnFiles:
    """The files that a recipe comes from.

    Attributes:
        sources: as `load_recipe` takes them.
        given: options of the command line, which win over the files.
        files: each file and its framework.
        recipe: the recipe before any change.
        switches_kernels: whether the user switches fused kernels on in another place than the files.
    """

    sources: Sequence[str]
    given: Mapping[str, Any]
    files: Sequence[tuple[str, str]]
    recipe: TrainingRecipe
    switches_kernels: bool = False

    def write(self, plan: TrainingRecipe) -> WrittenPlan:
        """Write a plan into the files, and read them again: they may mean more than the plan asks for.

        Options of the command line that the plan changes are the files' from then on.

        Raises:
            LigerprofError: recipes cannot express what the files say then.
        """
        edits = edit_files(self.files, self.recipe, plan)
        if not edits:
            return WrittenPlan(recipe=plan, edits=())
        return self._completed(plan, edits, self._read_back(plan, edits))

    def settle(self, plan: TrainingRecipe) -> TrainingRecipe | str:
        """What the files say once a plan is written into them, or why they cannot; raises LigerprofError as `write`.

        Files of a program that the user wrote leave to it what they have no key for, except fused kernels.
        """
        edits = edit_files(self.files, self.recipe, plan)
        if not edits:
            return plan
        spelled = edits[0].missing
        if "liger" in spelled and not self.switches_kernels and set(plan.kernels) - set(self.recipe.kernels):
            return self._without_keys([spelled["liger"]])
        whole = any(framework in _SELF_CONTAINED for _, framework in self.files)
        outside = _OUTSIDE | _KERNELS if self.switches_kernels else _OUTSIDE
        said = self._read_back(plan, edits)
        missing = self._missing(plan, edits, said)
        refused = [typed for name, typed in missing.items() if name not in outside and (whole or name in _KERNELS)]
        if refused:
            return self._without_keys(refused)
        return self._completed(plan, edits, said).recipe

    def _completed(self, plan: TrainingRecipe, edits: Sequence[FileEdit], said: TrainingRecipe) -> WrittenPlan:
        """What the changed files say, with the options that a program sets."""
        missing = self._missing(plan, edits, said)
        try:
            recipe = replace(said, **{name: getattr(plan, name) for name in missing})
        except RecipeError:
            # options of a plan that is only half in the files do not go together
            recipe = plan
        return WrittenPlan(recipe=recipe, edits=tuple(replace(edit, missing=missing) for edit in edits))

    def _read_back(self, plan: TrainingRecipe, edits: Sequence[FileEdit]) -> TrainingRecipe:
        changed = {name for name in self.given if getattr(plan, name) != getattr(self.recipe, name)}
        kept = {name: value for name, value in self.given.items() if name not in changed}
        options, _ = load_options(self.sources, kept, {edit.file: edit.values for edit in edits})
        said = TrainingRecipe(**options)
        return said if said.kernels else replace(said, provider=plan.provider)

    def _missing(self, plan: TrainingRecipe, edits: Sequence[FileEdit], said: TrainingRecipe) -> dict[str, str]:
        """The options for which no file has a key, as typed, and which the files do not imply."""
        found = ((name, typed) for name, typed in edits[0].missing.items() if name not in _DERIVED)
        return {name: typed for name, typed in found if getattr(said, name) != getattr(plan, name)}

    def _without_keys(self, options: Sequence[str]) -> str:
        # the function of a module:function
        name = Path(self.files[0][0]).name.rpartition(":")[2]
        having = f"{name} has" if len(self.files) == 1 else "the files have"
        return f"{having} no key for {', '.join(options)}"
