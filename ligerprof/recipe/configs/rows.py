"""Build the rows of a framework's table: for each key, how its value is read, and how options are written."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from ligerprof.errors import RecipeError
from ligerprof.kernels.selection import select_kernels
from ligerprof.recipe.configs.settings import Ignored, Lacking, LeftOut, Names, Outcome, Reading, Reason, Sets, Setting
from ligerprof.recipe.deepspeed import leaves
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.text import printable, short_repr
from ligerprof.torch_memory.optimizers import OPTIMIZERS

Read = Callable[[Any], Outcome]
Table = Mapping[str, "Row"]
UNSET = Ignored(reason=Reason.UNSET)
_TRUE = frozenset({"true", "yes", "on", "1", "y", "t"})
_FALSE = frozenset({"false", "no", "off", "0", "n", "f", "none", "null", ""})
_ZERO = re.compile(r"[+-]?0+(\.0*)?")


class BadValueError(ValueError):
    """A value that the key does not take; the message continues `FILE: KEY is VALUE, `."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """How a key is read.

    Attributes:
        read: what a value that is not null and not an object comes to.
        children: rows of the keys of an object.
        null: what null comes to.
        sets: the setting of a row that sets one alone, and is written as it is read.
        spell: the key's value for a value of that setting; None if it has none.
    """

    read: Read = field(default=lambda _: UNSET)
    children: Table | None = None
    null: Outcome = UNSET
    sets: Setting | None = None
    spell: Callable[[Any], Any] = field(default=lambda value: value)


def noted(words: str) -> Sets:
    """The outcome of a key whose meaning depends on others, in words."""
    return Sets(values={}, words=words)


def each(names: str, row: Row) -> dict[str, Row]:
    """The same row for several keys, whose names are separated by spaces."""
    return dict.fromkeys(names.split(), row)


def ignored(reason: Reason) -> Row:
    """A key without effect on memory, whatever its value."""
    return Row(read=lambda _: Ignored(reason=reason))


@cache
def known_keys(framework: str) -> Mapping[str, Any]:
    """The data file of a framework, which benchmarks/framework_keys.py compares with the framework's own classes.

    `source` is what the keys were read in, `sections` the keys without effect on memory by section and reason,
    `methods` the keys of training methods that recipes do not cover, and `files` what the files hold that the framework
    ships (axolotl 0.13, LLaMA-Factory 0.9.4, TRL). Keys that are `unsorted` are unknown.
    """
    path = Path(__file__).with_name("keys") / f"{framework}.json"
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def ignored_keys(framework: str, section: str = "") -> dict[str, Row]:
    """Rows of a framework's keys without effect on memory, at the top level or in a section."""
    by_reason = known_keys(framework)["sections"][section]
    return {name: ignored(Reason(reason)) for reason, names in by_reason.items() for name in names}


def left_out(what: str, names: str, *, harmless: tuple[Any, ...] = ()) -> dict[str, Row]:
    """Rows of keys whose effect the figures do not include; an empty or false value has none."""
    return _features(LeftOut(what=what), names, harmless)


def lacking(
    what: str, names: str, *, harmless: tuple[Any, ...] = (), setting: Setting | None = None, remedy: str = ""
) -> dict[str, Row]:
    """Rows of keys for something that recipes cannot express; an empty or false value, or a harmless one, is off."""
    return _features(Lacking(what=what, setting=setting, remedy=remedy), names, harmless)


def _features(outcome: Outcome, names: str, harmless: tuple[Any, ...]) -> dict[str, Row]:
    def read(value: Any) -> Outcome:
        is_harmless = any(type(value) is type(each) and value == each for each in harmless)
        return UNSET if is_harmless or is_off(value) or _is_disabled(value) else outcome

    return each(names, Row(read=read))


def parallelism(**names: str) -> dict[str, Row]:
    """Rows of keys with degrees of parallelism that recipes do not cover, by its kind: `tensor="tp_size"`."""
    found: dict[str, Row] = {}
    for kind, keys in names.items():
        found |= lacking(f"{kind} parallelism", keys, harmless=(1, "1"))
    return found


def _is_disabled(section_: Any) -> bool:
    """Whether a section has `enabled: false`, or consists of sections that have it."""
    if not isinstance(section_, Mapping):
        return False
    if "enabled" in section_:
        return is_off(section_["enabled"])
    inner = [value for value in section_.values() if isinstance(value, Mapping) and value]
    return bool(inner) and all(map(_is_disabled, inner))


def is_off(value: Any) -> bool:
    """Whether a value switches a feature off: empty, zero or false, also as text."""
    if isinstance(value, str):
        word = value.strip().lower()
        return word in _FALSE or _ZERO.fullmatch(word) is not None
    return value in (None, False, 0) or value in ([], {}, ())


def is_on(values: Mapping[str, Any], name: str) -> bool:
    """Whether a key is there with a value that switches its feature on."""
    return not is_off(values.get(name))


def sets(
    setting: Setting,
    convert: Callable[[Any], Any],
    *,
    auto: bool = False,
    spell: Callable[[Any], Any] = lambda value: value,
) -> Row:
    """A key that sets one setting; with `auto`, the word `auto` leaves the setting to other files."""

    def read(value: Any) -> Outcome:
        return UNSET if auto and value == "auto" else Sets(values={setting: convert(value)})

    return Row(read=read, sets=setting, spell=spell)


def count(setting: Setting, *, least: int = 1, auto: bool = False) -> Row:
    """A whole number; see `sets` on `auto`."""
    return sets(setting, lambda value: whole_number(value, least), auto=auto)


def whole_number(value: Any, least: int = 0) -> int:
    """A whole number from a number or text; raises BadValueError for anything else."""
    number = real_number(value)
    if not number.is_integer() or number < least:
        raise BadValueError(f"not a whole number of at least {least}")
    return int(number)


def real_number(value: Any) -> float:
    """A number from a number or text such as `2e-5`; raises BadValueError for anything else, and from 2**53."""
    try:
        number = float("nan" if isinstance(value, bool) or not isinstance(value, (int, float, str)) else value)
    except ValueError:
        number = math.nan
    except OverflowError:
        number = math.inf
    if math.isnan(number):
        raise BadValueError("not a number")
    if abs(number) >= 2**53:
        raise BadValueError("not a number below 2**53")
    return number


def number(setting: Setting, *, auto: bool = False) -> Row:
    """A number; see `sets` on `auto`."""
    return sets(setting, real_number, auto=auto)


def truth(value: Any) -> bool:
    """A switch from a boolean, 0 or 1, or text such as `yes`; raises BadValueError for anything else."""
    # a large number has more digits than Python writes
    word = str(value).strip().lower() if isinstance(value, (bool, str)) or value in (0, 1) else None
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise BadValueError("neither true nor false")


def switch(setting: Setting, *, invert: bool = False, auto: bool = False) -> Row:
    """A switch; see `sets` on `auto`."""
    return sets(setting, lambda value: truth(value) is not invert, auto=auto, spell=lambda value: value is not invert)


def turned_on(values: Mapping[Setting, Any], *, auto: bool = False) -> Row:
    """A switch that sets values where it is on, and nothing where it is off; see `sets` on `auto`."""
    return Row(read=lambda value: UNSET if (auto and value == "auto") or not truth(value) else Sets(values=values))


def text(setting: Setting) -> Row:
    """Any text."""

    def convert(value: Any) -> str:
        if not isinstance(value, str) or not value.strip() or not value.isprintable():
            raise BadValueError("not a text")
        return value.strip()

    return sets(setting, convert)


def words(setting: Setting, known: Mapping[str, Any], *, what: str, remedy: str = "") -> Row:
    """A word, upper or lower case, with the setting's value per `known` word, or an Outcome; `what` words name."""

    def read(value: Any) -> Outcome:
        if not isinstance(value, (str, bool)):
            raise BadValueError("not a word")
        word = str(value).strip().lower()
        if word not in known:
            return Lacking(what=f"{what} {printable(str(value))[:60]}", setting=setting, remedy=remedy)
        meaning = known[word]
        is_outcome = isinstance(meaning, (Sets, Names, Ignored, LeftOut, Lacking))
        return meaning if is_outcome else Sets(values={setting: meaning})

    def spell(value: Any) -> Any:
        meanings = (
            (word, each.values.get(setting) if isinstance(each, Sets) else each) for word, each in known.items()
        )
        return value if isinstance(value, bool) else next((word for word, each in meanings if each == value), None)

    return Row(read=read, sets=setting, spell=spell)


def part_of(what: str, names: str) -> dict[str, Row]:
    """Rows of keys whose meaning depends on other keys, which `finish` of the framework reads together."""
    return each(names, Row(read=lambda _: noted(what)))


def file_name(framework: str) -> Read:
    """Read the name of another configuration file, of the given framework."""

    def read(value: Any) -> Outcome:
        if not isinstance(value, str) or not value.isprintable():
            raise BadValueError("not a file name")
        return Names(file=value, framework=framework)

    return unless_off(read)


def unless_off(read: Read) -> Read:
    """Take values that switch a feature off as if they were not there."""
    return lambda value: UNSET if is_off(value) else read(value)


def section(*tables: Table, ignored: str = "", read: Read | None = None) -> Row:
    """An object with a table of its own.

    Args:
        ignored: the framework and the section of its data file, such as `trl.sft`, with the keys without effect.
        read: takes values that are not objects.
    """

    def refuse(value: Any) -> Outcome:
        if is_off(value):
            return UNSET
        raise BadValueError("not an object")

    found = ignored_keys(*ignored.split(".")) if ignored else {}
    for table in tables:
        found |= table
    return Row(children=found, read=read or refuse)


Converted = TypeVar("Converted")


def converted(reading: Reading, key: str, value: Any, convert: Callable[[Any], Converted]) -> Converted:
    """The value of a key as `convert` returns it; raises RecipeError for one that the key does not take."""
    try:
        return convert(value)
    except BadValueError as problem:
        raise RecipeError(f"{reading.file}: {key} is {short_repr(value)}, {problem}. Fix the file.") from None


def whole_number_at(reading: Reading, key: str, value: Any, least: int = 1) -> int:
    """A whole number under a key that is read after the table's rows; raises RecipeError for anything else."""
    return converted(reading, key, value, lambda each: whole_number(each, least))


def module_names(value: Any) -> Any:
    """Names of modules from a list or text; raises BadValueError for anything else."""
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return value
    raise BadValueError("not a list of module names")


def modules_at(reading: Reading, key: str, value: Any) -> Any:
    """Names of modules under a key that is read after the table's rows; raises RecipeError for anything else."""
    return converted(reading, key, value, module_names)


def object_in(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The section of a name; empty if there is none, or something else."""
    inner = values.get(name)
    return inner if isinstance(inner, Mapping) else {}


# those that this version does not have are refused by name
_LACKING = ("lion_8bit", "paged_lion_32bit", "paged_lion_8bit", "galore_adamw_8bit", "rmsprop", "adagrad")
# transformers' Trainer keeps the moments of embeddings in fp32 with 8-bit optimizers (Trainer.create_optimizer)
TRAINER_OPTIMIZERS: Mapping[str, Any] = {
    name: Sets(values={Setting.OPTIMIZER: word, Setting.FP32_EMBEDDING_STATES: True}) if row.is_eight_bit else word
    for word, row in OPTIMIZERS.items()
    for name in row.names
} | {name: name.replace("_", "-").removesuffix("-32bit") for name in _LACKING}

# DeepSpeed builds its own Adam, in one kernel on the GPU or on the CPU where the optimizer is offloaded
DEEPSPEED_OPTIMIZERS = {"adam": "default", "adamw": "default", "sgd": "sgd", "lion": "lion", "muon": "muon"}


# the keys of a framework for a value of a recipe, or None if it has none for that value; a dot separates a section
# from its key
Spelling = Callable[[TrainingRecipe], Mapping[str, Any] | None]
# switches of bitsandbytes; both at once are an error
BITS: Mapping[int | None, Mapping[str, bool]] = {
    None: {},
    4: {"load_in_4bit": True, "load_in_8bit": False},
    8: {"load_in_4bit": False, "load_in_8bit": True},
}


def _rows_of(rows: Table, setting: Setting, prefix: str = "") -> Iterator[tuple[str, Row]]:
    """The rows of a table that set a setting alone, each with its key."""
    for name, row in rows.items():
        if row.sets is setting:
            yield f"{prefix}{name}", row
        yield from _rows_of(row.children or {}, setting, f"{prefix}{name}.")


def as_read(rows: Table, options: str) -> dict[str, Spelling]:
    """Spellings of options, whose names are separated by spaces: by the first row that sets each."""
    return {name: _as_read(rows, name) for name in options.split()}


def _as_read(rows: Table, name: str) -> Spelling:
    key, row = next(_rows_of(rows, Setting(name)))

    def spell(recipe: TrainingRecipe) -> Mapping[str, Any] | None:
        value = row.spell(getattr(recipe, name))
        return None if value is None else {key: value}

    return spell


def liger(keys: Mapping[str, Any], kernels: str = "all", fused_loss: Mapping[str, Any] | None = None) -> Spelling:
    """The switch of liger-kernel, which selects this set of kernels, and that of its fused loss alone."""

    def spell(recipe: TrainingRecipe) -> Mapping[str, Any] | None:
        found, switched = set(recipe.kernels), set(select_kernels(kernels, recipe.spec))
        if found == {"flce"} and found != switched:
            return fused_loss
        # the file may have switched on more by itself
        return keys if switched and switched <= found else None

    return spell


def adapter(spelling: Spelling) -> dict[str, Spelling]:
    """The same keys for LoRA, QLoRA and their weights; a recipe that leaves LoRA for QLoRA changes both."""
    return dict.fromkeys(
        ("lora", "qlora", "quantization"), lambda recipe: spelling(recipe) if recipe.lora or recipe.qlora else None
    )


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


@dataclass(frozen=True, kw_only=True)
class Framework:
    """A kind of configuration file.

    Attributes:
        name: the word that names it in `NAME=FILE` and in JSON.
        title: what messages call it.
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
    finish: Finish = field(default=lambda _reading, _values: None)
    writes: Mapping[str, Spelling] | None = None

    def read(self, values: Mapping[str, Any], file: str) -> Reading:
        """Read every key of a file; raises RecipeError for a value that its key does not take."""
        reading = Reading(file=file, framework=self.name, is_complete=self.is_complete, defaults=dict(self.defaults))
        _apply(self.rows, values, reading, "")
        try:
            self.finish(reading, values)
        except BadValueError as problem:
            raise RecipeError(f"{file}: a value is {problem}. Fix the file.") from None
        if self.is_complete:
            leave_out_adapters(reading, values)
        return reading

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
    reading.note(key, value, row.null if value is None else converted(reading, key, value, row.read))
