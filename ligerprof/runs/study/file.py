"""A study file: grids of training steps, and the outline of the report about them."""

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

from ligerprof.errors import LigerprofError, RecipeError
from ligerprof.files import FileKind, read_text
from ligerprof.recipe.categories import Axis
from ligerprof.runs.study.outline import Options, Rows, Section, Value, names_in
from ligerprof.runs.study.schema import StudyFileError, build
from ligerprof.runs.sweep.grid import Grid, expand

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT_STUDY = "liger-2024.toml"
NO_KERNELS = "none"
_STUDY_FILE = FileKind(error=StudyFileError, hint="Give a TOML file that describes a study.", max_bytes=2**20)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSet:
    """Kernels with their provider: a column or a row of tables.

    Attributes:
        title: heading in tables; the set's name in the file by default.
    """

    liger: str
    provider: str = "ligerprof"
    title: str = ""

    @property
    def options(self) -> dict[str, str]:
        """The recipe's options."""
        return {"liger": self.liger, "provider": self.provider}


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Training steps that answer one question.

    Attributes:
        base: name of the options in `bases` to start from.
        options: values of recipe options, one or a list each; every combination is a step.
        kernels: names of kernel sets, each combined with every combination.
        find_limit: the axis whose largest value that fits is searched after the grid.
    """

    name: str
    options: Options
    question: str = ""
    base: str = ""
    kernels: tuple[str, ...] = ()
    find_limit: Axis | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """A whole study.

    Attributes:
        text: first paragraph of the report, and `claims` its list of results.
        kernels: kernel sets by name.
        bases: recipe options that several parts share, by name.
        cells: conditions that several tables share, by name.
        values: what texts can name in braces: constants, and values computed from the rows.
    """

    title: str
    parts: tuple[Part, ...]
    text: str = ""
    claims: tuple[str, ...] = ()
    kernels: Mapping[str, KernelSet] = field(default_factory=dict)
    bases: Mapping[str, Options] = field(default_factory=dict)
    cells: Mapping[str, Options] = field(default_factory=dict)
    values: Mapping[str, int | float | str | Value] = field(default_factory=dict)
    sections: tuple[Section, ...] = ()

    @property
    def providers(self) -> tuple[str, ...]:
        """Providers of the study's kernels."""
        return tuple(dict.fromkeys(one.provider for one in self.kernels.values() if one.liger != NO_KERNELS))

    def limits(self, part: Part) -> tuple[int, ...]:
        """The limits on reserved bytes of a part's steps; empty where it sets none."""
        return self._options(part).get("memory_limit_bytes", ())

    def grid(
        self, part: Part, *, device: str, memory_limit_bytes: int | None = None, providers: Iterable[str] | None = None
    ) -> Grid:
        """The grid of a part.

        Args:
            memory_limit_bytes: replaces the part's limit if it has one; None keeps it.
            providers: whose kernels; None: all. Steps without kernels always stay.
        """
        options = {**self._options(part), "device": (device,)}
        if memory_limit_bytes is not None and self.limits(part):
            options["memory_limit_bytes"] = (memory_limit_bytes,)
        kept = self.providers if providers is None else tuple(providers)
        sets = [self.kernels[name] for name in part.kernels]
        variants = tuple(one.options for one in sets if one.liger == NO_KERNELS or one.provider in kept)
        return Grid(options=options, variants=variants if part.kernels else ({},))

    def _options(self, part: Part) -> dict[str, tuple[Any, ...]]:
        return {**(self.bases[part.base] if part.base else {}), **part.options}

    def select(self, names: Iterable[str]) -> tuple[Part, ...]:
        """Parts by name in the study's order; all where none is named.

        Raises:
            RecipeError: no part has the name.
        """
        chosen = _known(names, [part.name for part in self.parts], "part")
        return tuple(part for part in self.parts if not chosen or part.name in chosen)

    def choose_providers(self, names: Iterable[str]) -> tuple[str, ...]:
        """Providers by name.

        Raises:
            RecipeError: the study has no kernels of that provider.
        """
        return _known(names, self.providers, "provider")


def load_study(path: Path | None = None) -> Study:
    """Read a study file, the 2024 study by default.

    Raises:
        StudyFileError: the file cannot be read, or its content is invalid.
    """
    if path is None:
        text = (resources.files("ligerprof") / "studies" / DEFAULT_STUDY).read_text(encoding="utf-8")
    else:
        text = read_text(path, _STUDY_FILE)
    try:
        study = build(Study, tomllib.loads(text), "")
        _check(study)
    except (LigerprofError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise StudyFileError(f"{path or DEFAULT_STUDY}: {error}") from None
    return study


def _check(study: Study) -> None:
    """Check what refers to something else in the file: names of kernels, conditions, bases and values."""
    defined_names = {"kernels": [*study.kernels], "cells": [*study.cells], "needs": [*study.values]}
    for place, item in _walk(study, ""):
        if isinstance(item, Rows) and item.by == "kernels":
            _require_known(map(str, item.values), study.kernels, f"{place}.values")
        for field_name in ("text", "caption", "notes", "claims"):
            texts = getattr(item, field_name, ())
            for text in (texts,) if isinstance(texts, str) else texts:
                local = ["minutes"] if field_name == "caption" else []
                _require_known(names_in(text), [*study.values, *local], f"{place}.{field_name}".lstrip("."))
        for field_name, defined in defined_names.items():
            names = item.get(field_name, ()) if isinstance(item, dict) else getattr(item, field_name, ())
            if not isinstance(names, Mapping):
                _require_known(names, defined, f"{place}.{field_name}")
    for number, part in enumerate(study.parts):
        place = f"parts[{number}] ({part.name})"
        if part.name in [other.name for other in study.parts[:number]]:
            raise StudyFileError(f"{place}: another part has that name.")
        _require_known([part.base] if part.base else [], study.bases, f"{place}.base")
        _, refusals = expand([study.grid(part, device="auto")], lambda _: None)
        if refusals:
            raise StudyFileError(f"{place}: {refusals[0].reason}")


def _walk(item: object, place: str) -> Iterator[tuple[str, Any]]:
    """Every dataclass and mapping under an object with its place in the file."""
    if isinstance(item, tuple):
        for number, one in enumerate(item):
            yield from _walk(one, f"{place}[{number}]")
    elif isinstance(item, dict) or dataclasses.is_dataclass(item):
        yield place, item
        inside = item if isinstance(item, dict) else {one.name: getattr(item, one.name) for one in fields(item)}
        for name, one in inside.items():
            yield from _walk(one, f"{place}.{name}" if place else name)


def _require_known(names: Iterable[str], known: Iterable[str], place: str) -> None:
    for name in names:
        if name not in known:
            raise StudyFileError(f"{place}: {name!r} is not defined. Known: {', '.join(known)}.")


def _known(names: Iterable[str], known: Sequence[str], what: str) -> tuple[str, ...]:
    chosen = tuple(names)
    if unknown := [name for name in chosen if name not in known]:
        raise RecipeError(f"the study has no {what} {unknown[0]!r}. Known: {', '.join(known)}.")
    return chosen
