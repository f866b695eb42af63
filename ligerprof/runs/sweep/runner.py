"""Plan and run the cells of a sweep, and find the largest sizes that fit."""

import dataclasses
import json
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ligerprof.analyzers.estimate import estimate, require_host_memory
from ligerprof.analyzers.search.fit import SEQ_STEP, find_border
from ligerprof.errors import LigerprofError, RecipeError
from ligerprof.files import write_new_file
from ligerprof.recipe.categories import Axis, Device
from ligerprof.recipe.conflicts import require_supported
from ligerprof.recipe.flags import recipe_flags
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.recipe.usable_memory import find_limit
from ligerprof.roles import Backend
from ligerprof.runs.sweep.cells import (
    Cell,
    CellStatus,
    Grid,
    Refusal,
    SweepFolder,
    cell_from_json,
    cell_key,
    disk_errors_in_a_line,
    expand,
)
from ligerprof.runs.sweep.starting import CellStarter, Command
from ligerprof.serialization import document, select, to_json

# done and out of memory
_EXIT_CODES_WITH_RESULT = (0, 3)
_LOG_TAIL_BYTES = 4096
_LONGEST_ERROR = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepSettings:
    """How to run the cells of a sweep.

    Attributes:
        timeout_seconds: time limit per cell; a cell that exceeds it is ended and counts as failed.
        stop_at_oom: skip cells that are larger than one of the same line that was out of memory.
    """

    timeout_seconds: float | None = None
    trace: bool = False
    jobs: int = 1
    stop_at_oom: bool = False
    again: bool = False


class CellProcess:
    """A running cell; raises RunDirectoryError if its files cannot be written."""

    def __init__(
        self, recipe: TrainingRecipe, folder: SweepFolder, settings: SweepSettings, starter: CellStarter
    ) -> None:
        self.recipe, self.key = recipe, cell_key(recipe)
        self._folder, self._settings = folder, settings
        self._started = time.monotonic()
        self._timed_out = False
        files = {"output": self._file("out"), "log": self._file("log")}
        with disk_errors_in_a_line(folder.path):
            self._running = starter.start(Command(words=self._words(), recipe=recipe, **files))

    def poll(self) -> dict[str, Any] | None:
        """The row if the cell has ended, else None; ends a cell that exceeds its time limit."""
        limit_seconds = self._settings.timeout_seconds
        code = self._running.poll()
        if code is None and limit_seconds is not None and self._seconds() > limit_seconds:
            self._timed_out = True
            self.stop()
            code = self._running.poll()
        return None if code is None else self._row(code)

    def words(self) -> str:
        """The last line of the cell's stderr that is not blank, shortened; empty if there is none."""
        try:
            with self._file("log").open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(0, end - _LOG_TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")[:_LONGEST_ERROR]

    def stop(self) -> None:
        """End the cell and all its processes."""
        self._running.stop()

    def _words(self) -> tuple[str, ...]:
        config = self.recipe.deepspeed_config
        flags = recipe_flags(dataclasses.replace(self.recipe, deepspeed_config=None))
        if config is not None:
            file = self._file("deepspeed.json")
            write_new_file(file, json.dumps(config), force=True)
            flags = (*flags, "--deepspeed-config", str(file))
        trace = "--trace" if self._settings.trace else "--no-trace"
        output = ("-o", str(self._folder.runs / self.key), "--force", "--json")
        return ("-m", "ligerprof", "step", *flags, trace, *output)

    def _file(self, suffix: str) -> Path:
        return self._folder.runs / f"{self.key}.{suffix}"

    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def _row(self, code: int) -> dict[str, Any]:
        result = self._result() if code in _EXIT_CODES_WITH_RESULT else None
        if result is not None:
            status = CellStatus.DONE if result["oom"] is None else CellStatus.OOM
            error = None
        else:
            status, error = CellStatus.FAILED, self._reason(code)
            now = datetime.now(timezone.utc).isoformat(timespec="seconds")
            result = {"recipe": self.recipe.to_json(), "finished": now}
        head = {"key": self.key, "status": status.value, "error": error, "seconds": round(self._seconds(), 3)}
        # the keys of a step's result, but not its kind, nor a failure's hundreds of blocks
        if isinstance(result.get("oom"), dict):
            result["oom"].pop("blocks", None)
        return {**document("cell", head), **{name: value for name, value in result.items() if name != "kind"}}

    def _result(self) -> dict[str, Any] | None:
        path = self._file("out")
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        path.unlink()
        return result if isinstance(result, dict) and "oom" in result else None

    def _reason(self, code: int) -> str:
        if self._timed_out:
            return f"took longer than {self._settings.timeout_seconds:g} s and was ended"
        words = self.words().removeprefix("Error: ")
        if abs(code) in (128 + signal.SIGKILL, signal.SIGKILL):
            return f"killed (signal 9; did the host run out of memory?) after: {words}"
        return words or f"ended with exit code {code} and printed nothing"


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
        """Run the recipes that are not finished, in order; raises SweepInterruptedError on Ctrl-C.

        Returns:
            The recipes skipped because a smaller step of their line was out of memory.
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
    return cell_key(replace(recipe, batch=1, seq=1))


UNITS: dict[Axis, int] = {Axis.BATCH: 1, Axis.SEQ: SEQ_STEP}

# a value that fits and one that does not; None if unknown
Edges = tuple[int | None, int | None]


class _ProbeFailedError(LigerprofError):
    """A step of the search failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Border:
    """Where memory ends along one axis, with all other options fixed; None for a side that was not found.

    Attributes:
        reason: why the search ended before the two were adjacent, or None.
        recipe: a step of the line; its value along the axis does not matter.
    """

    axis: Axis
    largest: int | None
    smallest_oom: int | None
    reason: str | None = None
    recipe: TrainingRecipe


def find_borders(runner: Runner, recipes: Iterable[TrainingRecipe], axis: Axis) -> tuple[Border, ...]:
    """The border of each line of the recipes, narrowed by finished cells; raises SweepInterruptedError on Ctrl-C."""
    lines: dict[str, TrainingRecipe] = {}
    for recipe in recipes:
        lines.setdefault(_border_line(recipe, axis), recipe)
    return tuple(_search(runner, recipe, axis) for recipe in lines.values())


def edges(cells: Iterable[Cell], axis: Axis) -> Edges:
    """The largest value along an axis that ran, and the smallest above it that was out of memory."""
    ends: dict[CellStatus, list[int]] = {status: [] for status in CellStatus}
    for cell in cells:
        ends[cell.status].append(getattr(cell.recipe, axis))
    largest = max(ends[CellStatus.DONE], default=None)
    lost = (value for value in ends[CellStatus.OOM] if largest is None or value > largest)
    return largest, min(lost, default=None)


def line_edges(cells: Iterable[Cell], recipe: TrainingRecipe, axis: Axis) -> Edges:
    """The edges of the cells that differ from a recipe in one axis alone."""
    line = _border_line(recipe, axis)
    return edges((cell for cell in cells if _border_line(cell.recipe, axis) == line), axis)


def largest_fitting(fits: Callable[[int], bool], guess: int, unit: int, known: Edges = (None, None)) -> int | None:
    """The largest multiple of `unit` that fits, or None; every value below one that fits is assumed to fit.

    `fits` is called at most once per value between the known ones, `guess` first.
    """
    low, high = known
    lowest = (low or 0) // unit
    most = None if high is None else -(-high // unit) - 1

    def fits_count(count: int) -> bool:
        return count <= lowest or fits(count * unit)

    return find_border(fits_count, start=max(guess // unit, lowest, 1), most=most) * unit or None


def _search(runner: Runner, recipe: TrainingRecipe, axis: Axis) -> Border:
    reason = None

    def runs(value: int) -> bool:
        nonlocal reason
        try:
            probe = recipe.resized(axis, value)
        except RecipeError as error:
            # the model has fewer positions
            reason = str(error)
            return False
        runner.run([probe])
        cell = runner.cells.get(cell_key(probe))
        if cell is not None and cell.status is CellStatus.FAILED:
            raise _ProbeFailedError(f"{probe.batch} x {probe.seq} failed: {cell.error}")
        # without a cell, it was skipped: a smaller one was out of memory
        return cell is not None and cell.status is CellStatus.DONE

    known = line_edges(runner.cells.values(), recipe, axis)
    try:
        largest_fitting(runs, _guess(recipe, axis, known), UNITS[axis], known)
    except _ProbeFailedError as error:
        reason = str(error)
    largest, smallest_oom = line_edges(runner.cells.values(), recipe, axis)
    return Border(recipe=recipe, axis=axis, largest=largest, smallest_oom=smallest_oom, reason=reason)


def _border_line(recipe: TrainingRecipe, axis: Axis) -> str:
    return cell_key(recipe.resized(axis, 1))


def _guess(recipe: TrainingRecipe, axis: Axis, known: Edges) -> int:
    """The estimated border; the recipe's own value if the estimate does not cover the recipe."""
    own: int = getattr(recipe, axis)
    try:
        limit_bytes = find_limit(recipe).size_bytes
        guess = largest_fitting(
            lambda value: estimate(recipe.resized(axis, value)).peak_bytes <= limit_bytes, own, UNITS[axis], known
        )
    except LigerprofError:
        return own
    return guess or own


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPlan:
    """The cells of grids, in order, without duplicates, and the axes along which to search for borders from a grid."""

    grids: tuple[Grid, ...]
    recipes: tuple[TrainingRecipe, ...]
    refusals: tuple[Refusal, ...] = ()
    searches: tuple[tuple[Axis, Grid], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepResult:
    """The result of a sweep.

    Attributes:
        cells: the cells of the plan and of the searches, in the order in which they were requested.
        rows: the cells' rows in results.jsonl.
        left_out: steps skipped because a smaller one was out of memory.
    """

    plan: SweepPlan
    folder: SweepFolder
    cells: tuple[Cell, ...]
    rows: tuple[Mapping[str, Any], ...]
    borders: tuple[Border, ...]
    left_out: tuple[TrainingRecipe, ...]

    def count(self, status: CellStatus) -> int:
        """The number of cells that ended this way."""
        return sum(cell.status is status for cell in self.cells)

    def to_json(self) -> dict[str, Any]:
        """The object of `ligerprof sweep --json`."""
        counts = {status.value: self.count(status) for status in CellStatus} | {"left_out": len(self.left_out)}
        return document(
            "sweep",
            select(self, "folder=folder.path", "plan.grids"),
            {"counts": counts},
            select(self, "cells=rows", "borders", "refused=plan.refusals"),
        )


def on_this_machine(grid: Grid) -> Grid:
    """The grid with `auto` replaced by this machine's device: measured and simulated cells need different keys."""
    from ligerprof.runs.step import choose_backend

    devices = tuple(Device(word) for word in grid.options.get("device", (Device.AUTO,)))
    if Device.AUTO in devices:
        here = Device.CUDA if choose_backend(TrainingRecipe()) is Backend.MEASURED else Device.SIMULATED
        devices = tuple(dict.fromkeys(here if device is Device.AUTO else device for device in devices))
    return replace(grid, options={**grid.options, "device": devices})


def make_plan(
    grids: tuple[Grid, ...], *, searches: tuple[tuple[Axis, Grid], ...] = (), skip_invalid: bool = False
) -> SweepPlan:
    """The cells of grids whose devices are not `auto`.

    Raises:
        RecipeError: a combination cannot be trained and `skip_invalid` is not set, or none can.
    """
    recipes, refusals = expand(grids, _require_runnable)
    if refusals and (not skip_invalid or not recipes):
        first = refusals[0]
        options = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in first.options.items())
        raise RecipeError(
            f"{len(refusals)} of {len(refusals) + len(recipes)} combinations cannot be trained, such as {options}: "
            f"{first.reason} Change the grid, or add --skip-invalid to leave them out."
        )
    return SweepPlan(grids=grids, recipes=recipes, refusals=refusals, searches=searches)


def run_sweep(plan: SweepPlan, folder: SweepFolder, settings: SweepSettings, watcher: Watcher) -> SweepResult:
    """Run the cells that are not finished, then search for the borders.

    Raises RecipeError for several jobs with timed cells, RunDirectoryError for another sweep's folder or one that is in
    use, and SweepInterruptedError on Ctrl-C.
    """
    if settings.jobs > 1 and any(recipe.device is not Device.SIMULATED for recipe in plan.recipes):
        raise RecipeError(
            f"--jobs {settings.jobs}: measured cells run one at a time, or they slow each other down. Leave it out."
        )
    folder.make()
    with folder.locked(), CellStarter(folder.path) as starter:
        folder.repair()
        folder.record_grids(to_json(plan.grids))
        runner = Runner(folder, settings, watcher, starter)
        left_out = runner.run(plan.recipes)
        borders = [
            border
            for axis, grid in plan.searches
            for border in find_borders(runner, expand([grid], _require_runnable)[0], axis)
        ]
        rows = folder.rows()
    keys = [key for key in runner.requested if key in rows]
    return SweepResult(
        plan=plan,
        folder=folder,
        cells=tuple(runner.cells[key] for key in keys),
        rows=tuple(rows[key] for key in keys),
        borders=tuple(borders),
        left_out=left_out,
    )


def _require_runnable(recipe: TrainingRecipe) -> None:
    require_supported(recipe, command="sweep", simulated=recipe.device is Device.SIMULATED)
    require_host_memory(recipe)
