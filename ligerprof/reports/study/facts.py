"""What the study's report knows: the cells of result files, where they were measured, and how to find one of them."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ligerprof.errors import ResultFormatError
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.study.cells import LIGER, OURS, SINGLE_KERNELS, SWEEP_BATCH, SWEEP_SEQ
from ligerprof.runs.sweep.borders import Axis, edges
from ligerprof.runs.sweep.cells import Cell, CellStatus, read_cells, read_rows

STUDY_MODEL, PAPER_MODEL = "llama3.2-1b", "llama3-8b"
_PACKAGES = {LIGER: "liger-kernel"}


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelColumn:
    """A kernel set with its provider: a column of the study's tables.

    Attributes:
        provider: None where no kernel is used.
    """

    liger: str
    provider: str | None = OURS

    @property
    def title(self) -> str:
        """Such as `all`, and `all, liger-kernel` where the kernels are not ours."""
        return self.liger if self.provider in (None, OURS) else f"{self.liger}, {_PACKAGES[self.provider]}"


NONE = KernelColumn(liger="none", provider=None)
NO_FLCE = KernelColumn(liger="no-flce")
ALL = KernelColumn(liger="all")
LIGER_ALL = KernelColumn(liger="all", provider=LIGER)
LINES: dict[Axis, str] = {"batch": f"batch at {SWEEP_SEQ} tokens", "seq": f"sequence at batch {SWEEP_BATCH}"}
COLUMNS = (NONE, NO_FLCE, ALL, LIGER_ALL)
SINGLES = tuple(KernelColumn(liger=name) for name in SINGLE_KERNELS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Finished cells of the study.

    Attributes:
        versions: package name and version, several versions of one package joined.
        days: when cells ended, as dates, ascending.
    """

    cells: tuple[Cell, ...]
    versions: tuple[tuple[str, str], ...]
    days: tuple[str, ...]

    @property
    def origin(self) -> str:
        """Whether the cells were measured or simulated, and on which cards."""
        found = {(cell.figures.backend, cell.gpu): None for cell in self.cells if cell.figures is not None}
        words = {"measured": "measured on", "simulated": "SIMULATED, nothing measured, for"}
        return " and ".join(f"{words[backend]} {gpu}" for backend, gpu in found)

    @property
    def limit_bytes(self) -> int | None:
        """The limit on reserved bytes of the ZeRO cells."""
        limits = {cell.recipe.memory_limit_bytes for cell in self.cells if cell.recipe.engine == "deepspeed"}
        return next(iter(limits)) if len(limits) == 1 else None

    def find(self, column: KernelColumn, *, batch: int, seq: int, loss: str = "hf") -> Cell | None:
        """The ZeRO cell of a kernel set at a size, None where there is none."""
        return _first(self.zero(column, loss=loss), batch, seq)

    def zero(self, column: KernelColumn, *, loss: str = "hf") -> tuple[Cell, ...]:
        """All ZeRO cells of a kernel set."""
        return tuple(
            cell
            for cell in self.cells
            if cell.recipe.spec.name == STUDY_MODEL
            and cell.recipe.engine == "deepspeed"
            and cell.recipe.loss == loss
            and _has(cell, column)
        )

    def paper(self, column: KernelColumn) -> tuple[Cell, ...]:
        """The cells of the paper's model with a kernel set."""
        return tuple(cell for cell in self.cells if cell.recipe.spec.name == PAPER_MODEL and _has(cell, column))


def read_facts(paths: Sequence[Path]) -> Facts:
    """Read result files, or folders of sweeps; failed cells are left out.

    Raises:
        ResultFormatError: a file that no sweep wrote, or no cell in any of them.
    """
    cells = tuple(cell for cell in read_cells(paths) if cell.status is not CellStatus.FAILED)
    if not cells:
        raise ResultFormatError("no finished cell of the study. Run `ligerprof study`, or name a file with --results.")
    versions: dict[str, dict[str, None]] = {}
    for _, row in itertools.chain.from_iterable(map(read_rows, paths)):
        for package, version in (row.get("versions") or {}).items():
            versions.setdefault(package, {})[str(version)] = None
    return Facts(
        cells=cells,
        versions=tuple((package, " and ".join(found)) for package, found in versions.items()),
        days=tuple(sorted({cell.finished.date().isoformat() for cell in cells if cell.finished is not None})),
    )


def largest_and_smallest(cells: Iterable[Cell], axis: Axis) -> tuple[int | None, int | None]:
    """The largest batch or sequence that ran and the smallest above it that was out of memory, the other one kept."""
    return edges((cell for cell in cells if _on_line(cell, axis)), axis)


def minutes_apart(cells: Iterable[Cell]) -> int | None:
    """Minutes from the first cell's end to the last one's; None where a row does not say when it ended."""
    ends = [cell.finished for cell in cells]
    known = [end for end in ends if end is not None]
    return round((max(known) - min(known)).total_seconds() / 60) if len(known) == len(ends) > 0 else None


def sizes_on(cells: Iterable[Cell], axis: Axis) -> tuple[int, ...]:
    """Every batch, or sequence, of the study's sweep along an axis, ascending."""
    return tuple(sorted({getattr(cell.recipe, axis) for cell in cells if _on_line(cell, axis)}))


def _on_line(cell: Cell, axis: Axis) -> bool:
    return cell.recipe.seq == SWEEP_SEQ if axis == "batch" else cell.recipe.batch == SWEEP_BATCH


def column_of(recipe: TrainingRecipe) -> KernelColumn:
    """The kernels of a recipe."""
    return KernelColumn(liger=recipe.liger, provider=recipe.provider if recipe.kernels else None)


def _has(cell: Cell, column: KernelColumn) -> bool:
    return column_of(cell.recipe) == column


def _first(cells: Iterable[Cell], batch: int, seq: int) -> Cell | None:
    return next((cell for cell in cells if (cell.recipe.batch, cell.recipe.seq) == (batch, seq)), None)
