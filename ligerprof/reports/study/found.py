"""The finished steps of a study: how to select them, and their figures."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ligerprof.errors import ResultFormatError
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Role
from ligerprof.runs.study.outline import KernelSet, Study
from ligerprof.runs.sweep.cells import Cell, CellStatus, read_cells, read_rows
from ligerprof.runs.sweep.grid import AXES, without_unused_options
from ligerprof.torch_memory.dtypes import FP32_BYTES
from ligerprof.units import GIB

Where = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Result rows of a study; `versions` maps packages to their versions."""

    study: Study
    cells: tuple[Cell, ...]
    versions: Mapping[str, Iterable[str]]

    @property
    def limit_bytes(self) -> int | None:
        """The limit on reserved bytes, if all cells that have a limit have the same one."""
        return shared_limit_bytes(cell for cell in self.cells if cell.recipe.memory_limit_bytes is not None)

    def select(self, where: Where) -> tuple[Cell, ...]:
        """The cells that meet conditions, in the order of their rows."""
        conditions = {key: values for name in where.get("cells", ()) for key, values in self.study.cells[name].items()}
        conditions |= {key: values for key, values in where.items() if key != "cells"}
        sets = [self.study.kernels[name] for name in conditions.pop("kernels", ())]
        return tuple(cell for cell in self.cells if _meets(without_unused_options(cell.recipe), conditions, sets))

    def find(self, where: Where) -> Cell | None:
        """The first cell that meets conditions."""
        return next(iter(self.select(where)), None)

    def is_above_oom(self, where: Where) -> bool:
        """Whether a cell with the same conditions, no larger in batch and sequence, was out of memory."""
        sizes = {name: max(where[name]) for name in AXES if name in where}
        rest = {name: values for name, values in where.items() if name not in sizes}
        return any(
            cell.status is CellStatus.OOM and all(getattr(cell.recipe, name) <= size for name, size in sizes.items())
            for cell in self.select(rest)
        )

    def title(self, recipe: TrainingRecipe) -> str:
        """The kernels of a recipe as tables name them."""
        recipe = without_unused_options(recipe)
        for one in self.study.kernels.values():
            if _uses(recipe, one):
                return one.title
        default = recipe.provider_names == KernelSet(liger="").provider
        return recipe.liger if default else f"{recipe.liger}, {recipe.provider_names}"


def read_found(study: Study, paths: Sequence[Path]) -> Found:
    """Read result files, or folders of sweeps; failed cells are left out, and of rows with one key the last counts.

    Raises:
        ResultFormatError: a file was not written by a sweep, or none of them contains a finished cell.
    """
    cells = tuple(cell for cell in read_cells(paths) if cell.status is not CellStatus.FAILED)
    if not cells:
        raise ResultFormatError("no finished cell of the study. Run `ligerprof study`, or name a file with --results.")
    versions: dict[str, dict[str, None]] = {}
    for _, row in itertools.chain.from_iterable(map(read_rows, paths)):
        for package, version in (row.get("versions") or {}).items():
            versions.setdefault(package, {})[str(version)] = None
    return Found(study=study, cells=cells, versions=versions)


def minutes_apart(cells: Iterable[Cell]) -> int | None:
    """Minutes from the end of the first cell to that of the last; None if a row does not say when it ended."""
    ends = [cell.finished for cell in cells]
    known = [end for end in ends if end is not None]
    return round((max(known) - min(known)).total_seconds() / 60) if len(known) == len(ends) > 0 else None


def shared_limit_bytes(cells: Iterable[Cell]) -> int | None:
    """The cells' limit on reserved bytes; None if they have none or several."""
    limits = {cell.recipe.memory_limit_bytes for cell in cells}
    return limits.pop() if len(limits) == 1 else None


def peak_bytes(cell: Cell) -> int:
    """Peak allocated bytes; 0 if the row lacks them."""
    return cell.figures.peak_bytes if cell.figures is not None else 0


def role_bytes(cell: Cell, *roles: Role) -> int:
    """Bytes of roles at the peak; 0 if the row lacks them."""
    return sum(cell.figures.roles[role] for role in roles) if cell.figures is not None else 0


def value_of(cell: Cell | None, show: str) -> float | None:
    """A figure as a number; None if the step did not finish, or its row lacks the figure."""
    return _FIGURES[show][0](cell) if cell is not None and cell.status is CellStatus.DONE else None


def figure_text(value: float, show: str, size_text: Callable[[int], str]) -> str:
    """A figure in words; `size_text` formats sizes."""
    form = _FIGURES[show][1]
    return form.format(value) if form else size_text(round(value))


def gib(size_bytes: int) -> str:
    """A size in GiB, two digits, for a table whose heading has the unit."""
    return f"{size_bytes / GIB:.2f}"


def percent(ratio: float, digits: int = 1) -> str:
    """The difference of a ratio from one, with its sign unless it rounds to zero."""
    value = round(100 * (ratio - 1), digits)
    return f"{value:+.{digits}f} %" if value else f"{0:.{digits}f} %"


def _loss_bytes(cell: Cell) -> int:
    return role_bytes(cell, Role.LOGITS, Role.SHIFT_LOGITS, Role.CE_TEMPORARIES)


def _logits_bytes(cell: Cell) -> int:
    """One [T, V] logits tensor in fp32."""
    return cell.recipe.tokens * cell.recipe.spec.vocab_size * FP32_BYTES


# how to compute each figure of a finished step, and its format; sizes have none
_FIGURES: Mapping[str, tuple[Callable[[Cell], float | None], str]] = {
    "peak": (lambda cell: peak_bytes(cell) or None, ""),
    "peak and reserved": (lambda cell: peak_bytes(cell) or None, ""),
    "tokens/s": (lambda cell: cell.tokens_per_second, "{:,.0f}"),
    "loss": (_loss_bytes, ""),
    "loss share": (lambda cell: 100 * _loss_bytes(cell) / max(peak_bytes(cell), 1), "{:.0f} %"),
    "loss in logits": (lambda cell: _loss_bytes(cell) / _logits_bytes(cell), "{:.2f} x"),
    "logits": (_logits_bytes, ""),
    # between several steps
    "minutes": (lambda _: None, ""),
}


def _meets(recipe: TrainingRecipe, conditions: Where, sets: Sequence[KernelSet]) -> bool:
    values = {name: recipe.spec.name if name == "model" else getattr(recipe, name) for name in conditions}
    return all(values[name] in allowed for name, allowed in conditions.items()) and (
        not sets or any(_uses(recipe, one) for one in sets)
    )


def _uses(recipe: TrainingRecipe, kernels: KernelSet) -> bool:
    return all(getattr(recipe, name) == value for name, value in kernels.options.items())
