"""A framework whose configuration files can be read: its table, its defaults, and how a file of it is recognized."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ligerprof.errors import RecipeError
from ligerprof.recipe.configs.rows import BadValueError, Row, Spelling, Table, explain_bad, is_off
from ligerprof.recipe.configs.settings import Reading, Reason, Setting
from ligerprof.text import printable

# why such keys are left out, where nothing says that this is meant
UNUSED = "adapters, which no key of the file switches on: every weight is counted as trained (--lora RANK counts them)"
_OF_ADAPTERS = re.compile(r"(^|_)(q?lora|rs_?lora|ada_?lora|dora|ia3|peft|adapters?)(_|$)")
# what becomes of adapters, and weights that are merged before training
_OF_FILES = re.compile(r"merge|hub|push|export|create_new|(lora_model_dir|lora_out_dir|adapter_name_or_path|_folder)$")
_SWITCHES = ("use_peft", "use_lora", "adapter", "finetuning_type")


def leave_out_adapters(reading: Reading, values: Mapping[str, Any]) -> None:
    """Take the keys of adapters from those that were read, if the file trains none, and say so."""
    if Setting.RANK in reading.settings or any(found.key.startswith(_SWITCHES) for found in reading.lacking):
        return
    names = [
        name
        for name, value in values.items()
        if _OF_ADAPTERS.search(name) and not _OF_FILES.search(name) and not is_off(value)
    ]
    switch = next((name for name in _SWITCHES if name in values), None)
    for name in names:
        reading.read.pop(name, None)
        reading.ignored.pop(name, None)
        if switch is None or switch in names:
            reading.left_out[name] = UNUSED
        else:
            reading.left_out.pop(name, None)
            reading.ignored[name] = Reason.OTHER_METHOD
    if switch is not None and switch not in names and names:
        reading.assumed.append(f"{switch} switches adapters off: {printable(', '.join(names))} without effect")


Finish = Callable[[Reading, Mapping[str, Any]], None]


def _nothing_more(_reading: Reading, _values: Mapping[str, Any]) -> None:
    """A framework whose keys can be read one by one."""


@dataclass(frozen=True, kw_only=True)
class Framework:
    """A kind of configuration file.

    Attributes:
        name: the word that names it in `NAME=FILE` and in JSON.
        title: what messages call it.
        rows: one row per key.
        signature: keys that tell the framework from others; at least one is in each of its files.
        family: frameworks that extend one another have the same, whose files may not say what they train; empty for
            those whose files do.
        defaults: the framework's values of settings that a file does not mention.
        is_complete: whether the file describes a whole training run. Defaults of others, such as DeepSpeed's, count
            only where no file is complete.
        finish: reads what depends on several keys; called after all rows.
        writes: how options of a recipe are written, by name; None for a framework whose files are not changed.
    """

    name: str
    title: str
    rows: Table
    signature: frozenset[str]
    defaults: Mapping[Setting, Any] = field(default_factory=dict)
    family: str = ""
    is_complete: bool = True
    finish: Finish = _nothing_more
    writes: Mapping[str, Spelling] | None = None

    def read(self, values: Mapping[str, Any], file: str) -> Reading:
        """Read every key of a file.

        Raises:
            RecipeError: a value that its key does not take.
        """
        reading = Reading(file=file, framework=self.name, is_complete=self.is_complete, defaults=dict(self.defaults))
        _apply(self.rows, values, reading, "")
        try:
            self.finish(reading, values)
        except BadValueError as problem:
            raise RecipeError(f"{file}: a value is {problem}. Fix the file.") from None
        if self.is_complete:
            leave_out_adapters(reading, values)
        return reading

    def unknown_keys(self, values: Mapping[str, Any]) -> list[str]:
        """The file's keys that the table lacks, at the top level only."""
        return [key for key in values if key not in self.rows]

    def knows_most(self, values: Mapping[str, Any]) -> bool:
        """Whether the table has at least half of the file's keys, those of its sections included."""
        known, unknown = _counts(self.rows, values)
        return known >= unknown


def _counts(rows: Table, values: Mapping[str, Any]) -> tuple[int, int]:
    """The keys of an object that a table has, and those that it lacks; sections count by their own keys."""
    known = unknown = 0
    for name, value in values.items():
        row = rows.get(name)
        if row is None:
            unknown += sum(1 for _ in leaves(value)) if isinstance(value, Mapping) else 1
        elif row.children is not None and isinstance(value, Mapping):
            inner = _counts(row.children, value)
            known, unknown = known + inner[0], unknown + inner[1]
        else:
            known += 1
    return known, unknown


def _apply(rows: Table, values: Mapping[str, Any], reading: Reading, prefix: str) -> None:
    for name, value in values.items():
        key, row = f"{prefix}{name}", rows.get(name)
        if row is None:
            reading.unknown.append(key)
        elif row.children is not None and (inner := _object(value)) is not None:
            _apply(row.children, inner, reading, f"{key}.")
        else:
            apply_row(row, key, value, reading)


def _object(value: Any) -> Mapping[str, Any] | None:
    """An object, also one that is written as JSON in a text, as HF's arguments may be."""
    if isinstance(value, str) and value.lstrip()[:1] == "{":
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, Mapping) else None


def apply_row(row: Row, key: str, value: Any, reading: Reading) -> None:
    """Read one key into a reading; raises RecipeError for a value that the key does not take."""
    try:
        outcome = row.null if value is None else row.read(value)
    except BadValueError as problem:
        raise RecipeError(explain_bad(reading.file, key, value, problem)) from None
    reading.note(key, value, outcome)


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is not an object, with its dotted key."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
