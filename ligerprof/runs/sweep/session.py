"""Plan a sweep from its grids, and run it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ligerprof.analyzers.estimate import require_host_memory
from ligerprof.errors import RecipeError
from ligerprof.recipe.categories import Axis, Device
from ligerprof.recipe.conflicts import require_supported
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Backend
from ligerprof.runs.sweep.cells import Cell, CellStatus, SweepFolder
from ligerprof.runs.sweep.grid import Grid, Refusal, expand
from ligerprof.runs.sweep.runner import Border, Runner, SweepSettings, Watcher, find_borders
from ligerprof.runs.sweep.starting import CellStarter
from ligerprof.serialization import document, select, to_json


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPlan:
    """The cells to run.

    Attributes:
        recipes: the cells of the grids, in order, without duplicates.
        searches: axes along which to search for borders afterwards, each with the grid to search from.
    """

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

    Raises:
        RecipeError: several jobs, and cells are timed.
        RunDirectoryError: another sweep is running in the folder, or it contains something else.
        SweepInterruptedError: on Ctrl-C.
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
