"""What the study's report knows: the cells of result files, where they were measured, and how to find one of them."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ligerprof.analyzers.cells import RESULTS_NAME, Cell, CellStatus, read_cells
from ligerprof.errors import ResultFormatError
from ligerprof.runs.sweep.study import LIGER, OURS, SWEEP_BATCH, SWEEP_SEQ

STUDY_MODEL, PAPER_MODEL = "llama3.2-1b", "llama3-8b"


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelColumn:
    """A kernel set with its provider: a column of the study's tables.

    Attributes:
        provider: None where no kernel is used.
    """

    title: str
    liger: str
    provider: str | None


NONE = KernelColumn(title="none", liger="none", provider=None)
NO_FLCE = KernelColumn(title="no-flce", liger="no-flce", provider=OURS)
ALL = KernelColumn(title="all", liger="all", provider=OURS)
LIGER_ALL = KernelColumn(title="all, liger-kernel", liger="all", provider=LIGER)
COLUMNS = (NONE, NO_FLCE, ALL, LIGER_ALL)


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
    days = set()
    for row in _rows(paths):
        days.add(str(row.get("finished", ""))[:10])
        for package, version in (row.get("versions") or {}).items():
            versions.setdefault(package, {})[str(version)] = None
    return Facts(
        cells=cells,
        versions=tuple((package, " and ".join(found)) for package, found in versions.items()),
        days=tuple(sorted(filter(None, days))),
    )


def largest_and_smallest(cells: Iterable[Cell], axis: str) -> tuple[int | None, int | None]:
    """The largest batch or sequence that ran and the smallest above it that was out of memory, the other one kept."""
    line = [cell for cell in cells if _on_line(cell, axis)]
    ran = [getattr(cell.recipe, axis) for cell in line if cell.status is CellStatus.DONE]
    lost = [getattr(cell.recipe, axis) for cell in line if cell.status is CellStatus.OOM]
    largest = max(ran, default=None)
    return largest, min((size for size in lost if largest is None or size > largest), default=None)


def sizes_on(cells: Iterable[Cell], axis: str) -> tuple[int, ...]:
    """Every batch, or sequence, of the study's sweep along an axis, ascending."""
    return tuple(sorted({getattr(cell.recipe, axis) for cell in cells if _on_line(cell, axis)}))


def _on_line(cell: Cell, axis: str) -> bool:
    return cell.recipe.seq == SWEEP_SEQ if axis == "batch" else cell.recipe.batch == SWEEP_BATCH


def _has(cell: Cell, column: KernelColumn) -> bool:
    provider = cell.recipe.provider if cell.recipe.kernels else None
    return cell.recipe.liger == column.liger and provider == column.provider


def _first(cells: Iterable[Cell], batch: int, seq: int) -> Cell | None:
    return next((cell for cell in cells if (cell.recipe.batch, cell.recipe.seq) == (batch, seq)), None)


def _rows(paths: Iterable[Path]) -> Iterable[dict[str, Any]]:
    """Lines that `read_cells` has read before."""
    for path in paths:
        file = path / RESULTS_NAME if path.is_dir() else path
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                # the last line of a sweep that is at work
                return
