"""Read a study file: grids of training steps and the outline of their report; docs/study.md has every key."""

import dataclasses
import re
import string
import types
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from ligerprof.errors import LigerprofError, RecipeError
from ligerprof.files import FileKind, parse_toml, read_text
from ligerprof.recipe.categories import Axis
from ligerprof.recipe.training import RECIPE_OPTIONS
from ligerprof.runs.sweep.cells import Grid, expand

Show = Literal["peak", "peak and reserved", "tokens/s", "loss", "loss share", "loss in logits", "logits", "minutes"]
FigureKind = Literal["batch", "seq", "peak-batch", "peak-seq", "ablation", "roles", "accuracy"]
_NO_KERNELS = "none"


class StudyFileError(LigerprofError):
    """A study file that cannot be read, or whose content is invalid."""


class StudyOptions(dict[str, tuple[Any, ...]]):
    """Recipe options by name, each with one value or several."""

    KNOWN: ClassVar[tuple[str, ...]] = tuple(RECIPE_OPTIONS)


class Conditions(StudyOptions):
    """Values that a recipe's options must have for its step to be selected; several values are alternatives.

    `cells` names an entry in the study's `cells`, and `kernels` entries in its `kernels`.
    """

    KNOWN = (*RECIPE_OPTIONS, "cells", "kernels")


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSet:
    """Kernels with their provider: a column or a row of tables."""

    liger: str
    provider: str = "ligerprof"
    title: str = ""

    @property
    def options(self) -> dict[str, str]:
        """The recipe's options."""
        return {"liger": self.liger, "provider": self.provider}


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyPart:
    """A grid of training steps: every combination of option values and kernel sets.

    Attributes:
        base: the entry in `bases` that `options` adds to.
        find_limit: axis along which to search for the largest value that fits, after the grid has run.
    """

    name: str
    options: StudyOptions
    base: str = ""
    kernels: tuple[str, ...] = ()
    find_limit: Axis | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyValue:
    """A value that texts name in braces, computed from the result rows."""

    find: Literal["figure", "largest", "smallest-oom", "limit", "spread", "end"]
    show: Show = "peak"
    axis: Axis = Axis.BATCH
    where: Conditions = field(default_factory=Conditions)
    against: Conditions | None = None
    within_minutes: int | None = None
    beyond_minutes: int | None = None
    words: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One column of a table."""

    title: str
    show: Show
    where: Conditions = field(default_factory=Conditions)
    against: Conditions | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Steps that differ in one axis alone."""

    title: str
    axis: Axis
    where: Conditions


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyTable:
    """A table whose rows are sizes, kernel sets, lines, roles or steps; `by` decides which other fields apply."""

    by: Literal["batch", "seq", "size", "kernels", "line", "role", "step"]
    heading: str = ""
    caption: str = ""
    where: Conditions = field(default_factory=Conditions)
    values: tuple[int, ...] = ()
    kernels: tuple[str, ...] = ()
    columns: tuple[Column, ...] = ()
    show: Show = "peak"
    complete: bool = False
    least: int = 1
    lines: tuple[Line, ...] = ()
    axis: Axis = Axis.BATCH


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A figure as `ligerprof plot` draws it."""

    name: str
    kind: FigureKind
    alt: str
    where: Conditions | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A section of the report, left out if it has no table, claim or note."""

    title: str
    text: str = ""
    where: Conditions = field(default_factory=Conditions)
    needs: tuple[str, ...] = ()
    tables: tuple[StudyTable, ...] = ()
    notes: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """A whole study file.

    Attributes:
        bases: recipe options that several parts share.
        cells: conditions that several tables share.
    """

    title: str
    parts: tuple[StudyPart, ...]
    text: str = ""
    claims: tuple[str, ...] = ()
    kernels: Mapping[str, KernelSet] = field(default_factory=dict)
    bases: Mapping[str, StudyOptions] = field(default_factory=dict)
    cells: Mapping[str, Conditions] = field(default_factory=dict)
    values: Mapping[str, StudyValue] = field(default_factory=dict)
    sections: tuple[Section, ...] = ()

    @property
    def providers(self) -> tuple[str, ...]:
        """Providers of the study's kernels."""
        return tuple(dict.fromkeys(one.provider for one in self.kernels.values() if one.liger != _NO_KERNELS))

    def grid(
        self,
        part: StudyPart,
        *,
        device: str,
        memory_limit_bytes: int | None = None,
        providers: Collection[str] | None = None,
    ) -> Grid:
        """The grid of a part.

        Args:
            memory_limit_bytes: replaces the part's limit if it has one; None keeps it.
            providers: run only these providers' kernels; None runs all. Steps without kernels always run.
        """
        options = {**part.options, "device": (device,)}
        if memory_limit_bytes is not None and "memory_limit_bytes" in options:
            options["memory_limit_bytes"] = (memory_limit_bytes,)
        sets = [self.kernels[name] for name in part.kernels]
        variants = tuple(
            one.options for one in sets if providers is None or one.liger == _NO_KERNELS or one.provider in providers
        )
        return Grid(options=options, variants=variants if sets else ({},))


DEFAULT_STUDY = "liger-2024.toml"
_STUDY_FILE = FileKind(error=StudyFileError, hint="Give a TOML file that describes a study.", max_bytes=2**20)
_TYPES = {str: "a string", int: "an integer", bool: "true or false", list: "a list", dict: "a table"}
_FORMAT = re.compile(r"[-+ <>=^]?[0-9]{0,2},?(?:\.[0-9]{1,2})?[a-z%]?")
_TEXTS = ("text", "caption", "notes", "claims")


def load_study(path: Path | None = None) -> Study:
    """Read a study file, the 2024 study by default.

    Raises:
        StudyFileError: the file cannot be read, or its content is invalid.
    """
    if path is None:
        text = Path(__file__).with_name(DEFAULT_STUDY).read_text(encoding="utf-8")
    else:
        text = read_text(path, _STUDY_FILE)
    tables = parse_toml(text, str(path or DEFAULT_STUDY), _STUDY_FILE)
    try:
        study: Study = _convert(Study, tables, "")
        defined = {"kernels": study.kernels, "cells": study.cells, "base": study.bases, "needs": study.values}
        texts = dict.fromkeys(_TEXTS, study.values)
        _check_names(tables, "", {**defined, **texts, "caption": [*study.values, "minutes"]})
        return _complete(study)
    except (LigerprofError, RecursionError) as error:
        raise StudyFileError(f"{path or DEFAULT_STUDY}: {error}") from None


def names_in(text: str) -> tuple[str, ...]:
    """The values that a text names in braces.

    Raises:
        StudyFileError: its braces do not match, or a value has an unusual format.
    """
    try:
        fields = [(name, spec) for _, name, spec, _ in string.Formatter().parse(text) if name is not None]
    except ValueError as error:
        raise StudyFileError(f"{text!r:.60}: {error}.") from None
    # a width can take any amount of memory
    if any(spec and not _FORMAT.fullmatch(spec) for _, spec in fields):
        raise StudyFileError(f"{text!r:.60}: a format has at most a sign, a width of two digits and a precision.")
    return tuple(name for name, _ in fields)


def _convert(hint: Any, value: object, key: str) -> Any:
    """A value as a type hint describes it; `key` is its dotted name in errors."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is types.UnionType:
        # an optional value: TOML has no null
        hint, origin = arguments[0], None
    if origin is tuple:
        items = enumerate(_require(list, value, key))
        return tuple(_convert(arguments[0], item, f"{key}[{number}]") for number, item in items)
    if origin is Mapping:
        return {
            name: _convert(arguments[1], item, f"{key}.{name}") for name, item in _require(dict, value, key).items()
        }
    if origin is Literal or issubclass(hint, Enum):
        words = get_args(hint) or tuple(hint)
        if value not in words:
            raise StudyFileError(f"{key}: unknown value {value!r:.60}. Known: {', '.join(words)}.")
        return value if origin is Literal else hint(value)
    if issubclass(hint, StudyOptions):
        return _convert_options(hint, value, key)
    return _convert_table(hint, value, key) if dataclasses.is_dataclass(hint) else _require(hint, value, key)


def _convert_table(kind: Any, value: object, key: str) -> Any:
    table = _require(dict, value, key)
    hints = get_type_hints(kind)
    prefix = f"{key}." if key else ""
    for name in table:
        if name not in hints:
            raise StudyFileError(f"{prefix}{name}: unknown key. Known: {', '.join(hints)}.")
    for item in dataclasses.fields(kind):
        if item.name not in table and item.default is item.default_factory is dataclasses.MISSING:
            raise StudyFileError(f"{prefix}{item.name}: missing.")
    return kind(**{name: _convert(hints[name], item, f"{prefix}{name}") for name, item in table.items()})


def _convert_options(kind: type[StudyOptions], value: object, key: str) -> StudyOptions:
    options = kind()
    for name, item in _require(dict, value, key).items():
        if name not in kind.KNOWN:
            raise StudyFileError(f"{key}.{name}: unknown option. Known: {', '.join(kind.KNOWN)}.")
        items = item if isinstance(item, list) else [item]
        options[name] = tuple(_convert_option(name, one, f"{key}.{name}") for one in items)
    return options


def _convert_option(name: str, value: object, key: str) -> Any:
    if name not in RECIPE_OPTIONS:
        return _require(str, value, key)
    option = RECIPE_OPTIONS[name]
    try:
        return option.parse(value) if option.is_size and isinstance(value, str) else option.check(value)
    except RecipeError as error:
        raise StudyFileError(f"{key}: {error}") from None


def _require(kind: type, value: Any, key: str) -> Any:
    # not isinstance: true is not an integer here
    if type(value) is not kind:
        raise StudyFileError(f"{key}: {value!r:.60} is not {_TYPES[kind]}.")
    return value


def _check_names(value: object, key: str, defined: Mapping[str, Iterable[str]]) -> None:
    """Check every string below a key that refers to something else in the file.

    Args:
        defined: the names that strings may refer to, by the key that holds the strings.
    """
    if isinstance(value, dict):
        for name, item in value.items():
            _check_names(item, f"{key}.{name}".lstrip("."), defined)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            _check_names(item, f"{key}[{number}]", defined)
    elif isinstance(value, str):
        field = key.rpartition(".")[2].partition("[")[0]
        if field not in defined:
            return
        for name in names_in(value) if field in _TEXTS else [value]:
            if name not in defined[field]:
                raise StudyFileError(f"{key}: {name!r} is not defined. Known: {', '.join(defined[field])}.")


def _complete(study: Study) -> Study:
    """The study with titles for all kernel sets, and parts whose options include those of their base."""
    sets = {name: dataclasses.replace(one, title=one.title or name) for name, one in study.kernels.items()}
    parts: list[StudyPart] = []
    for number, part in enumerate(study.parts):
        place = f"parts[{number}] ({part.name})"
        if part.name in [other.name for other in parts]:
            raise StudyFileError(f"{place}: another part has that name.")
        options = StudyOptions({**study.bases.get(part.base, {}), **part.options})
        parts.append(dataclasses.replace(part, options=options))
        _, refusals = expand([study.grid(parts[-1], device="auto")], lambda _: None)
        if refusals:
            raise StudyFileError(f"{place}: {refusals[0].reason}")
    return dataclasses.replace(study, kernels=sets, parts=tuple(parts))
