"""Write a change of a recipe into the file that the recipe comes from: its own keys, on its own lines."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ligerprof.errors import OutputError, RecipeError
from ligerprof.files import FileKind, is_file, read_text
from ligerprof.recipe.categories import Precision
from ligerprof.recipe.configs.documents import parse_document
from ligerprof.recipe.configs.optimizers import OPTIMIZERS
from ligerprof.recipe.configs.sharding_edits import NO_KEYS, deepspeed_keys
from ligerprof.recipe.options import Option
from ligerprof.recipe.training import RECIPE_OPTIONS, TrainingRecipe

_FILE = FileKind(error=RecipeError, hint="--config names the file to edit.", max_bytes=2**18)
_OFF_BY_DEFAULT = ("load_in_4bit", "load_in_8bit")
# the keys of a framework for a value of a recipe, or None if it has none for that value
Spelling = Callable[[TrainingRecipe], Mapping[str, Any] | None]


def _spelled(key: str, name: str) -> Spelling:
    return lambda recipe: {key: getattr(recipe, name)}


def _optimizer(key: str) -> Spelling:
    def spell(recipe: TrainingRecipe) -> Mapping[str, Any] | None:
        names = [name for name, word in OPTIMIZERS.items() if word == recipe.optimizer]
        return {key: names[0]} if names else None

    return spell


def _kernels(keys: Mapping[str, Any], kernels: str = "all", fused_loss: Mapping[str, Any] | None = None) -> Spelling:
    """The switch of liger-kernel, which selects this set of kernels, and that of its fused loss alone."""
    return lambda recipe: {kernels: keys, "flce": fused_loss}.get(recipe.liger)


def _amp(recipe: TrainingRecipe) -> Mapping[str, Any] | None:
    return {Precision.AMP: {"bf16": True}, Precision.AMP_FP16: {"fp16": True}}.get(recipe.precision)


# switches of bitsandbytes; both at once are an error
_BITS: Mapping[int | None, Mapping[str, bool]] = {
    None: {},
    4: {"load_in_4bit": True, "load_in_8bit": False},
    8: {"load_in_4bit": False, "load_in_8bit": True},
}


def _trl_adapter(recipe: TrainingRecipe) -> Mapping[str, Any] | None:
    return {
        "use_peft": True,
        "lora_r": recipe.lora or recipe.qlora,
        "lora_target_modules": "all-linear",
        **_BITS[recipe.packed_bits],
    }


def _axolotl_adapter(recipe: TrainingRecipe) -> Mapping[str, Any] | None:
    return {
        "adapter": "qlora" if recipe.qlora else "lora",
        "lora_r": recipe.lora or recipe.qlora,
        "lora_target_linear": True,
        **_BITS[recipe.packed_bits],
    }


def _llama_factory_adapter(recipe: TrainingRecipe) -> Mapping[str, Any] | None:
    return {
        "finetuning_type": "lora",
        "lora_rank": recipe.lora or recipe.qlora,
        "lora_target": "all",
        **({} if recipe.packed_bits is None else {"quantization_bit": recipe.packed_bits}),
    }


def _adapter(spelling: Spelling) -> dict[str, Spelling]:
    """The same keys for LoRA, QLoRA and their weights; a recipe that leaves LoRA for QLoRA changes both."""
    return dict.fromkeys(
        ("lora", "qlora", "quantization"), lambda recipe: spelling(recipe) if recipe.lora or recipe.qlora else None
    )


_TRAINER: Mapping[str, Spelling] = {
    "batch": _spelled("per_device_train_batch_size", "batch"),
    "grad_accum": _spelled("gradient_accumulation_steps", "grad_accum"),
    "checkpointing": _spelled("gradient_checkpointing", "checkpointing"),
    "optimizer": _optimizer("optim"),
    "precision": _amp,
    "liger": _kernels(
        {"use_liger_kernel": True},
        fused_loss={
            "use_liger_kernel": True,
            "liger_kernel_config": {
                "fused_linear_cross_entropy": True,
                **dict.fromkeys(("cross_entropy", "rope", "rms_norm", "swiglu", "geglu", "layer_norm"), False),
            },
        },
    ),
}
_LIGER_PLUGIN = "axolotl.integrations.liger.LigerPlugin"
_AXOLOTL: Mapping[str, Spelling] = {
    **_adapter(_axolotl_adapter),
    "batch": _spelled("micro_batch_size", "batch"),
    "grad_accum": _spelled("gradient_accumulation_steps", "grad_accum"),
    "seq": _spelled("sequence_len", "seq"),
    "checkpointing": _spelled("gradient_checkpointing", "checkpointing"),
    "optimizer": _optimizer("optimizer"),
    "liger": _kernels(
        {
            "plugins": [_LIGER_PLUGIN],
            "liger_rope": True,
            "liger_rms_norm": True,
            "liger_glu_activation": True,
            "liger_fused_linear_cross_entropy": True,
        },
        fused_loss={"plugins": [_LIGER_PLUGIN], "liger_fused_linear_cross_entropy": True},
    ),
}
SPELLINGS: Mapping[str, Mapping[str, Spelling]] = {
    "transformers": _TRAINER,
    # TRL 1.15 and later have a loss of their own
    "trl-sft": {
        **_TRAINER,
        **_adapter(_trl_adapter),
        "liger": _kernels({"use_liger_kernel": True}, "no-flce"),
        "seq": _spelled("max_length", "seq"),
    },
    "axolotl": _AXOLOTL,
    "llama-factory": {
        **_TRAINER,
        **_adapter(_llama_factory_adapter),
        "checkpointing": lambda recipe: {"disable_gradient_checkpointing": not recipe.checkpointing},
        "liger": _kernels({"enable_liger_kernel": True}),
        "seq": _spelled("cutoff_len", "seq"),
    },
    # its own file, next to one of another framework or of none
    "deepspeed": {},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyChange:
    """One key of a file and its new value; `old` is None for a key that the file does not have.

    Attributes:
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
        file: the file that was edited; it is not written.
        changes: the keys that change, in the order of recipe options.
        not_in_file: options that change, as typed, for which the file has no key.
        content: the new text of the file.
    """

    file: str
    changes: tuple[KeyChange, ...]
    not_in_file: tuple[str, ...]
    content: str

    @property
    def lines(self) -> Iterator[str]:
        """The changed lines: what leaves the file after `-`, what comes after `+`."""
        for change in self.changes:
            if change.old is not None:
                yield f"- {change.key}: {json.dumps(change.old)}"
            kept = "the rest as before, and " if change.differences != change.new else ""
            yield f"+ {change.key}: {kept}{json.dumps(change.differences)}"

    def to_json(self) -> dict[str, Any]:
        """The value of `edit` in JSON results."""
        changes = [{"key": change.key, "old": change.old, "new": change.new} for change in self.changes]
        return {"file": self.file, "changes": changes, "not_in_file": list(self.not_in_file)}


def can_edit(file: str, framework: str) -> bool:
    """Whether `edit_file` can write a file of this framework."""
    return framework in SPELLINGS and Path(file).suffix.lower() != ".toml" and is_file(file)


def edit_file(
    file: str, framework: str, before: TrainingRecipe, after: TrainingRecipe, *, shards: bool = True
) -> FileEdit:
    """Change the keys of a file from one recipe to another; comments of YAML and other lines stay.

    Args:
        shards: whether this file decides how the model is sharded, rather than one of accelerate.

    Raises:
        RecipeError: the file is written in a way that lines cannot be replaced in.
    """
    path = Path(file)
    content = read_text(path, _FILE)
    values = parse_document(content, path)
    changes: list[KeyChange] = []
    missing: list[str] = []
    sharding = deepspeed_keys(file, framework, values, after) if shards else NO_KEYS
    for name, declared in RECIPE_OPTIONS.items():
        # the provider of kernels goes with their switch
        if getattr(before, name) == getattr(after, name) or name == "provider":
            continue
        spelling = SPELLINGS[framework].get(name)
        keys = sharding.keys if name in sharding.options else spelling(after) if spelling is not None else None
        if keys is None:
            missing.append(_typed(declared, getattr(after, name)))
            continue
        for key, value in keys.items():
            old = values.get(key)
            new = _joined(old, value)
            # a switch that the file does not have is off
            is_same = old == new or (old is None and key in _OFF_BY_DEFAULT and new is False)
            if not is_same and key not in {change.key for change in changes}:
                differences = _differences(sharding.before.get(key, old), new)
                changes.append(KeyChange(key=key, old=old, new=new, differences=differences))
    edited = {change.key: change.new for change in changes}
    new_content = _edited(content, values, edited)
    if parse_document(new_content, path) != {**values, **edited}:
        raise RecipeError(f"{file}: {', '.join(edited)} cannot be replaced line by line. Edit the file by hand.")
    return FileEdit(file=file, changes=tuple(changes), not_in_file=tuple(missing), content=new_content)


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


def _edited(content: str, values: Mapping[str, Any], edited: Mapping[str, Any]) -> str:
    if not edited:
        return content
    if content.lstrip()[:1] == "{":
        indent = re.match(r"\s*\{\s*\n([ \t]+)", content)
        return json.dumps({**values, **edited}, indent=indent[1] if indent else 2, ensure_ascii=False) + "\n"
    lines = content.splitlines()
    for key, value in edited.items():
        _replace_lines(lines, key, _yaml_text(value))
    return "\n".join(lines) + "\n"


def _replace_lines(lines: list[str], key: str, value: str) -> None:
    """Replace the lines of a key at the top level, or add one at the end."""
    pattern = re.compile(rf"{re.escape(key)}\s*:(?P<value>[^#]*?)(?P<comment>\s+#.*)?$")
    for start, line in enumerate(lines):
        if (found := pattern.match(line)) is not None:
            end = _end_of_value(lines, start)
            lines[start:end] = [f"{key}: {value}{found['comment'] or ''}"]
            return
    lines.append(f"{key}: {value}")


def _end_of_value(lines: Sequence[str], start: int) -> int:
    """The line after the last one of a value: what follows is indented, or an item of a list."""
    end = start + 1
    for number in range(start + 1, len(lines)):
        line = lines[number]
        if line.strip() and not line.lstrip().startswith("#"):
            if not line[0].isspace() and not line.startswith("-"):
                break
            end = number + 1
    return end


def _yaml_text(value: Any) -> str:
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w./-]*", value) and value.lower() not in _YAML_WORDS:
        return value
    # JSON is YAML, too
    return json.dumps(value, ensure_ascii=False)


_YAML_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})


def require_editable(found: tuple[str, str] | None) -> None:
    """Raise OutputError if no --config file has keys for the changes; `found` is such a file, or None."""
    if found is None:
        raise OutputError(
            "-o writes a changed copy of a --config file of transformers, TRL, axolotl, LLaMA-Factory or DeepSpeed."
            " Give one."
        )
