"""Write a change of a recipe into the files that the recipe comes from: their own keys, on their own lines."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ligerprof.errors import OutputError, RecipeError
from ligerprof.files import FileKind, is_file, read_text
from ligerprof.recipe.configs.documents import parse_document
from ligerprof.recipe.configs.rewriting import rewrite, value_at, with_values
from ligerprof.recipe.configs.sharding_edits import NO_KEYS, sharding_keys
from ligerprof.recipe.configs.sources import is_function
from ligerprof.recipe.configs.spellings import SPELLINGS, TITAN_FUNCTION
from ligerprof.recipe.configs.titan_checkpointing import CLASS
from ligerprof.recipe.configs.titan_checkpointing import SECTION as CHECKPOINTING
from ligerprof.recipe.configs.torchtitan import NAME as TORCHTITAN
from ligerprof.recipe.configs.torchtitan import values_of_function
from ligerprof.recipe.options import Option
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
_LAUNCHER, _DEEPSPEED = "accelerate", "deepspeed"
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
        """The text of the file after the change; comments of YAML and TOML and other lines stay. None for a function.

        Raises:
            RecipeError: the file is written in a way that lines cannot be replaced in.
        """
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


def can_edit(file: str, framework: str) -> bool:
    """Whether `edit_file` has keys for a file of this framework."""
    if framework not in SPELLINGS:
        return False
    if framework == TORCHTITAN:
        return is_function(file) or Path(file).suffix.lower() == ".toml"
    return Path(file).suffix.lower() != ".toml" and is_file(file)


def switch_liger(files: Sequence[tuple[str, str]]) -> bool:
    """Whether `edit_files` can switch fused kernels on in one of the files, as each framework does: liger-kernel's."""
    return any(can_edit(*each) and "liger" in SPELLINGS[each[1]] for each in files)


def edit_files(files: Sequence[tuple[str, str]], before: TrainingRecipe, after: TrainingRecipe) -> tuple[FileEdit, ...]:
    """Change the files that describe a recipe: each option in the first of them that has a key for it.

    Where a file of accelerate is among them, it decides how the model is sharded, or DeepSpeed's JSON that it names,
    and the number of micro-batches per step goes to the trainer's file, too.

    Args:
        files: each file and its framework.

    Returns:
        An edit per file that can be edited; `missing` of each is what no file has a key for.

    Raises:
        RecipeError: as `edit_file`.
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
    """Change the keys of a file from one recipe to another.

    Args:
        shards: whether this file decides how the model is sharded, rather than one of accelerate.
        options: the options to change in this file; None: all that differ.

    Raises:
        RecipeError: the file, or DeepSpeed's JSON that it names, cannot be read.
    """
    spellings = SPELLINGS[framework]
    text = None
    if is_function(file):
        values, spellings = values_of_function(file), SPELLINGS[TITAN_FUNCTION]
    else:
        text = read_text(Path(file), _FILE)
        values = parse_document(text, Path(file))
    changes: dict[str, KeyChange] = {}
    missing: dict[str, str] = {}
    sharding = sharding_keys(file, framework, values, after) if shards else NO_KEYS
    # accelerate takes no settings of DeepSpeed next to the JSON that it names
    names_json = value_at(values, f"{_SECTION}deepspeed_config_file") is not None
    for name in _changed(before, after) if options is None else options:
        spelling = spellings.get(name)
        keys = sharding.keys if name in sharding.options else spelling(after) if spelling is not None else None
        if keys is None or (names_json and any(key.startswith(_SECTION) for key in keys)):
            missing[name] = _typed(RECIPE_OPTIONS[name], getattr(after, name))
            continue
        for key, value in keys.items():
            old = value_at(values, key)
            new = _joined(old, value)
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


def _typed(declared: Option, value: Any) -> str:
    return " ".join(declared.typed(value)) if value is not None else f"no {declared.flag}"


def _differences(old: Any, new: Any) -> Any:
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return new
    return {key: _differences(old.get(key), value) for key, value in new.items() if old.get(key) != value}


def _joined(old: Any, new: Any) -> Any:
    """A list is added to the one that the file has."""
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
