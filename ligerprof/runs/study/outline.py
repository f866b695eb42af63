"""The outline of a study's report: values, sections, tables and figures; docs/study.md describes every key."""

import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_type_hints

from ligerprof.errors import RecipeError
from ligerprof.recipe.categories import Axis
from ligerprof.recipe.training import RECIPE_OPTIONS, TrainingRecipe
from ligerprof.runs.study.schema import StudyFileError, convert
from ligerprof.units import parse_bytes

Show = Literal["peak", "reserved", "peak and reserved", "tokens/s", "loss", "loss share", "loss in logits", "logits"]
FigureKind = Literal[
    "batch", "seq", "peak-batch", "peak-seq", "throughput-batch", "throughput-seq", "ablation", "roles", "accuracy"
]


class Options(dict[str, tuple[Any, ...]]):
    """Recipe options by name, each with one value or several."""

    EXTRA: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def read(cls, values: object, key: str) -> "Options":
        """Options from a table whose values are single values or lists.

        Raises:
            StudyFileError: an unknown option, or a value of the wrong type.
        """
        hints = {**get_type_hints(TrainingRecipe), **dict.fromkeys(cls.EXTRA, str)}
        known = [*RECIPE_OPTIONS, *cls.EXTRA]
        read = cls()
        for name, value in convert(dict[str, Any], values, key).items():
            if name not in known:
                raise StudyFileError(f"{key}.{name}: unknown option. Known: {', '.join(known)}.")
            listed = value if isinstance(value, list) else [value]
            read[name] = tuple(_read_option(hints[name], name, one, f"{key}.{name}") for one in listed)
        return read


class Conditions(Options):
    """Values that a recipe's options must have for its step to be selected; lists hold alternatives.

    `cells` names conditions in the study's `cells`, `kernels` sets in its `kernels`.
    """

    EXTRA = ("cells", "kernels")


def names_in(text: str) -> tuple[str, ...]:
    """The values that a text names in braces.

    Raises:
        StudyFileError: its braces do not match.
    """
    try:
        return tuple(name for _, name, _, _ in string.Formatter().parse(text) if name is not None)
    except ValueError as error:
        raise StudyFileError(f"{text!r:.60}: {error}.") from None


def _read_option(hint: Any, name: str, value: object, key: str) -> Any:
    if name.endswith("_bytes") and isinstance(value, str):
        try:
            return parse_bytes(value)
        except RecipeError as error:
            raise StudyFileError(f"{key}: {error}") from None
    return convert(hint, value, key)


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """A value that texts name, computed from the result rows."""

    find: Literal["figure", "largest", "smallest-oom", "limit", "spread", "end"]
    show: Show = "peak"
    axis: Axis = Axis.BATCH
    where: Conditions = field(default_factory=Conditions)
    minus: Conditions | None = None
    against: Conditions = field(default_factory=Conditions)
    within_minutes: int | None = None
    beyond_minutes: int | None = None
    words: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The rows of a table."""

    by: Literal["batch", "seq", "size", "kernels"]
    heading: str
    values: tuple[int | str, ...] = ()
    where: Conditions = field(default_factory=Conditions)


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One column of a table."""

    title: str
    show: Show | Literal["minutes"]
    where: Conditions = field(default_factory=Conditions)
    against: Conditions | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Figures of steps by row and column."""

    rows: Rows
    caption: str = ""
    columns: tuple[Column, ...] = ()
    kernels: tuple[str, ...] = ()
    show: Show = "peak"
    complete: bool = False
    least: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Steps that differ in one axis alone."""

    title: str
    axis: Axis
    where: Conditions


@dataclass(frozen=True, kw_only=True, slots=True)
class Borders:
    """A table of the largest sizes that ran, a row per line and kernel set."""

    lines: tuple[Line, ...]
    kernels: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """A table of the roles at the peak, a column per batch or sequence and kernel set."""

    caption: str
    axis: Axis
    values: tuple[int, ...]
    kernels: tuple[str, ...]
    least_share: float = 0.005


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimates:
    """A table of the estimated peaks next to those of the steps, all or those that meet conditions."""

    where: Conditions = field(default_factory=Conditions)


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A figure as `ligerprof plot` draws it."""

    name: str
    kind: FigureKind
    alt: str
    where: Conditions | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A section of the report, left out where it has neither a table nor a claim nor a note."""

    title: str
    text: str = ""
    where: Conditions = field(default_factory=Conditions)
    needs: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    borders: Borders | None = None
    roles: Roles | None = None
    estimates: Estimates | None = None
    notes: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()
