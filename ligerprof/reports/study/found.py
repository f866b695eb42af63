"""The finished steps of a study, and how to select them."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ligerprof.errors import ResultFormatError
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.reports.sweep import origin_words
from ligerprof.runs.study.file import KernelSet, Study
from ligerprof.runs.sweep.cells import Cell, CellStatus, read_cells, read_rows
from ligerprof.runs.sweep.grid import AXES, without_unused_options


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Result rows of a study.

    Attributes:
        versions: package name and version; several versions of one package are joined.
        days: dates on which cells ended, ascending.
    """

    study: Study
    cells: tuple[Cell, ...]
    versions: tuple[tuple[str, str], ...]
    days: tuple[str, ...]

    @property
    def origin(self) -> str:
        """Whether the cells were measured or simulated, and on which GPUs."""
        found = {(cell.figures.backend, cell.gpu): None for cell in self.cells if cell.figures is not None}
        return " and ".join(origin_words(backend, gpu) for backend, gpu in found)

    @property
    def limit_bytes(self) -> int | None:
        """The limit on reserved bytes, where all cells that have a limit have the same one."""
        limits = {cell.recipe.memory_limit_bytes for cell in self.cells} - {None}
        return limits.pop() if len(limits) == 1 else None

    def select(self, where: Mapping[str, Any]) -> tuple[Cell, ...]:
        """The cells that meet conditions, in the order of their rows."""
        (name,) = where.get("cells", (None,))
        conditions = {**(self.study.cells[name] if name is not None else {}), **where}
        sets = [self.study.kernels[name].options for name in conditions.pop("kernels", ())]
        conditions.pop("cells", None)
        return tuple(cell for cell in self.cells if _meets(without_unused_options(cell.recipe), conditions, sets))

    def find(self, where: Mapping[str, Any]) -> Cell | None:
        """The first cell that meets conditions."""
        return next(iter(self.select(where)), None)

    def is_above_oom(self, where: Mapping[str, Any]) -> bool:
        """Whether a cell with the same conditions, no larger in batch and sequence, was out of memory."""
        sizes = {name: max(where[name]) for name in AXES if name in where}
        rest = {name: values for name, values in where.items() if name not in sizes}
        return any(
            cell.status is CellStatus.OOM and all(getattr(cell.recipe, name) <= size for name, size in sizes.items())
            for cell in self.select(rest)
        )

    def kernel_title(self, name: str) -> str:
        """A kernel set as tables name it."""
        return self.study.kernels[name].title or name

    def title(self, recipe: TrainingRecipe) -> str:
        """The kernels of a recipe as tables name them."""
        recipe = without_unused_options(recipe)
        for name, one in self.study.kernels.items():
            if _is_set(recipe, one.options):
                return one.title or name
        return recipe.liger if recipe.provider == KernelSet(liger="").provider else f"{recipe.liger}, {recipe.provider}"


def read_found(study: Study, paths: Sequence[Path]) -> Found:
    """Read result files, or folders of sweeps; failed cells are left out, and of rows with one key the last counts.

    Raises:
        ResultFormatError: a file that a sweep did not write, or none of them holds a finished cell.
    """
    cells = tuple(cell for cell in read_cells(paths) if cell.status is not CellStatus.FAILED)
    if not cells:
        raise ResultFormatError("no finished cell of the study. Run `ligerprof study`, or name a file with --results.")
    versions: dict[str, dict[str, None]] = {}
    for _, row in itertools.chain.from_iterable(map(read_rows, paths)):
        for package, version in (row.get("versions") or {}).items():
            versions.setdefault(package, {})[str(version)] = None
    return Found(
        study=study,
        cells=cells,
        versions=tuple((package, " and ".join(found)) for package, found in versions.items()),
        days=tuple(sorted({cell.finished.date().isoformat() for cell in cells if cell.finished is not None})),
    )


def minutes_apart(cells: Iterable[Cell]) -> int | None:
    """Minutes from the end of the first cell to that of the last; None where a row does not say when it ended."""
    ends = [cell.finished for cell in cells]
    known = [end for end in ends if end is not None]
    return round((max(known) - min(known)).total_seconds() / 60) if len(known) == len(ends) > 0 else None


def _meets(recipe: TrainingRecipe, conditions: Mapping[str, Any], sets: Sequence[Mapping[str, str]]) -> bool:
    values = {name: recipe.spec.name if name == "model" else getattr(recipe, name) for name in conditions}
    return all(values[name] in allowed for name, allowed in conditions.items()) and (
        not sets or any(_is_set(recipe, one) for one in sets)
    )


def _is_set(recipe: TrainingRecipe, options: Mapping[str, str]) -> bool:
    return all(getattr(recipe, name) == value for name, value in options.items())
