"""The format of a study file: grids of training steps and the outline of their report; docs/study.md has every key."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from ligerprof.errors import LigerprofError
from ligerprof.recipe.categories import Axis
from ligerprof.recipe.training import RECIPE_OPTIONS
from ligerprof.runs.sweep.grid import Grid

Show = Literal["peak", "peak and reserved", "tokens/s", "loss", "loss share", "loss in logits", "logits", "minutes"]
FigureKind = Literal[
    "batch", "seq", "peak-batch", "peak-seq", "throughput-batch", "throughput-seq", "ablation", "roles", "accuracy"
]
_NO_KERNELS = "none"


class StudyFileError(LigerprofError):
    """A study file that cannot be read, or whose content is invalid."""


class Options(dict[str, tuple[Any, ...]]):
    """Recipe options by name, each with one value or several."""

    KNOWN: ClassVar[tuple[str, ...]] = tuple(RECIPE_OPTIONS)


class Conditions(Options):
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
class Part:
    """A grid of training steps: every combination of option values and kernel sets.

    Attributes:
        base: the entry in `bases` that `options` adds to.
        find_limit: axis along which to search for the largest value that fits, after the grid has run.
    """

    name: str
    options: Options
    base: str = ""
    kernels: tuple[str, ...] = ()
    find_limit: Axis | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
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
class Table:
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
    tables: tuple[Table, ...] = ()
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
    parts: tuple[Part, ...]
    text: str = ""
    claims: tuple[str, ...] = ()
    kernels: Mapping[str, KernelSet] = field(default_factory=dict)
    bases: Mapping[str, Options] = field(default_factory=dict)
    cells: Mapping[str, Conditions] = field(default_factory=dict)
    values: Mapping[str, Value] = field(default_factory=dict)
    sections: tuple[Section, ...] = ()

    @property
    def providers(self) -> tuple[str, ...]:
        """Providers of the study's kernels."""
        return tuple(dict.fromkeys(one.provider for one in self.kernels.values() if one.liger != _NO_KERNELS))

    def grid(
        self,
        part: Part,
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
