"""Run the cells of a sweep that are not finished yet, and append each one's row."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ligerprof.errors import LigerprofError
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.sweep.cells import Cell, CellStatus, cell_from_json
from ligerprof.runs.sweep.folder import SweepFolder
from ligerprof.runs.sweep.grid import cell_key
from ligerprof.runs.sweep.process import CellProcess, SweepSettings
from ligerprof.runs.sweep.starting import CellStarter

_POLL_SECONDS = 0.1


class SweepInterruptedError(LigerprofError):
    """The user stopped the sweep; finished cells are kept."""

    exit_code = 130


class Watcher:
    """Receives a sweep's progress, and extrapolates the remaining time from the mean duration of ended cells."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._started = self._last_end = now()
        self.expected_count = self.ended_count = 0

    def expect(self, count: int) -> None:
        """`count` more cells are to run; negative: fewer."""
        self.expected_count += count

    def working(self, recipe: TrainingRecipe, words: str) -> None:
        """A cell is running, and this is the last line it printed; called several times per second."""

    def ended(self, cell: Cell) -> None:  # noqa: ARG002 - for subclasses
        """A cell has ended, and its row is written."""
        self.ended_count += 1
        self._last_end = self._now()

    @property
    def left(self) -> str:
        """Such as `about 4 min left`; the number of cells until the first has ended."""
        cells = max(self.expected_count - self.ended_count, 0)
        if not self.ended_count or not cells:
            return f"{cells} left"
        mean_seconds = (self._last_end - self._started) / self.ended_count
        seconds = max(mean_seconds * cells - (self._now() - self._last_end), 0.0)
        return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"


class Runner:
    """Runs cells in a sweep folder, which the caller has locked and repaired.

    Attributes:
        cells: every cell of the folder by key.
        requested: keys of the requested cells, in order, including those that were already finished.
    """

    def __init__(self, folder: SweepFolder, settings: SweepSettings, watcher: Watcher, starter: CellStarter) -> None:
        self._folder, self._settings, self._watcher, self._starter = folder, settings, watcher, starter
        self._running: list[CellProcess] = []
        self.cells = folder.read()
        self.requested: dict[str, None] = {}

    def run(self, recipes: Sequence[TrainingRecipe]) -> tuple[TrainingRecipe, ...]:
        """Run the recipes that are not finished, in order.

        Returns:
            The recipes skipped because a smaller step of their line was out of memory.

        Raises:
            SweepInterruptedError: on Ctrl-C.
        """
        self.requested.update(dict.fromkeys(cell_key(recipe) for recipe in recipes))
        waiting = deque(recipe for recipe in recipes if self._settings.again or not self._is_finished(recipe))
        left_out: list[TrainingRecipe] = []
        self._watcher.expect(len(waiting))
        try:
            while waiting or self._running:
                self._start(waiting, left_out)
                self._collect()
                time.sleep(_POLL_SECONDS)
        except KeyboardInterrupt:
            raise SweepInterruptedError(
                f"{self._folder.path}: stopped, cells left: {len(waiting) + len(self._running)}. "
                "The same command continues from here."
            ) from None
        finally:
            for process in self._running:
                process.stop()
            self._running.clear()
        return tuple(left_out)

    def _is_finished(self, recipe: TrainingRecipe) -> bool:
        """Whether the cell is done or was out of memory; a failed one runs again."""
        cell = self.cells.get(cell_key(recipe))
        return cell is not None and cell.status is not CellStatus.FAILED

    def _start(self, waiting: deque[TrainingRecipe], left_out: list[TrainingRecipe]) -> None:
        while waiting and len(self._running) < self._settings.jobs:
            recipe = waiting.popleft()
            if self._settings.stop_at_oom and is_beyond(recipe, self.cells.values()):
                left_out.append(recipe)
                self._watcher.expect(-1)
            else:
                self._running.append(CellProcess(recipe, self._folder, self._settings, self._starter))

    def _collect(self) -> None:
        for process in list(self._running):
            row = process.poll()
            if row is None:
                self._watcher.working(process.recipe, process.words())
                continue
            self._running.remove(process)
            self._folder.append(row)
            cell = cell_from_json(row, f"cell {process.key}")
            self.cells[process.key] = cell
            self._watcher.ended(cell)


def is_beyond(recipe: TrainingRecipe, cells: Iterable[Cell]) -> bool:
    """Whether a cell of the same line, no larger in batch and sequence, was out of memory."""
    line = _line(recipe)
    return any(
        cell.status is CellStatus.OOM
        and cell.recipe.batch <= recipe.batch
        and cell.recipe.seq <= recipe.seq
        and _line(cell.recipe) == line
        for cell in cells
    )


def _line(recipe: TrainingRecipe) -> str:
    """The key shared by steps that differ only in batch and sequence."""
    return cell_key(replace(recipe, batch=1, seq=1))
