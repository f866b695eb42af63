"""One sweep from its grids to its result: which cells, in which folder, and what they came to."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ligerprof.errors import RecipeError
from ligerprof.recipe.categories import Axis, Device
from ligerprof.recipe.conflicts import require_supported
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Backend
from ligerprof.runs.sweep.borders import Border, find_borders
from ligerprof.runs.sweep.cells import Cell, CellStatus
from ligerprof.runs.sweep.folder import SweepFolder
from ligerprof.runs.sweep.grid import Grid, Refusal, expand
from ligerprof.runs.sweep.runner import Runner, RunnerSettings, Watcher


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPlan:
    """What is to run.

    Attributes:
        recipes: the cells of the grids, in order, each once.
        refusals: combinations that are left out because they cannot be trained.
        searches: whose border is searched then, on the lines of which grids.
    """

    grids: tuple[Grid, ...]
    recipes: tuple[TrainingRecipe, ...]
    refusals: tuple[Refusal, ...] = ()
    searches: tuple[tuple[Axis, Grid], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepResult:
    """What a sweep came to.

    Attributes:
        cells: those of the plan and of the search for borders, in the order they were asked for.
        rows: the same as they stand in results.jsonl.
        left_out: what did not run because a smaller step was out of memory.
    """

    plan: SweepPlan
    folder: SweepFolder
    cells: tuple[Cell, ...]
    rows: tuple[Mapping[str, Any], ...]
    borders: tuple[Border, ...]
    left_out: tuple[TrainingRecipe, ...]

    def count(self, status: CellStatus) -> int:
        """Cells that ended so."""
        return sum(cell.status is status for cell in self.cells)

    def to_json(self) -> dict[str, Any]:
        """The object of `ligerprof sweep --json`."""
        return {
            "schema": 1,
            "kind": "sweep",
            "folder": str(self.folder.path),
            "grids": [grid.to_json() for grid in self.plan.grids],
            "counts": {status.value: self.count(status) for status in CellStatus} | {"left_out": len(self.left_out)},
            "cells": list(self.rows),
            "borders": [border.to_json() for border in self.borders],
            "refused": [{"options": dict(refusal.values), "reason": refusal.reason} for refusal in self.plan.refusals],
        }


def on_this_machine(grid: Grid) -> Grid:
    """The grid with device `auto` made out: a measured and a simulated cell are never the same one."""
    from ligerprof.runs.step import choose_backend

    devices = tuple(Device(word) for word in grid.options.get("device", (Device.AUTO,)))
    if Device.AUTO in devices:
        here = Device.CUDA if choose_backend(TrainingRecipe()) is Backend.MEASURED else Device.SIMULATED
        devices = tuple(dict.fromkeys(here if device is Device.AUTO else device for device in devices))
    return replace(grid, options={**grid.options, "device": devices})


def make_plan(
    grids: tuple[Grid, ...], *, searches: tuple[tuple[Axis, Grid], ...] = (), skip_invalid: bool = False
) -> SweepPlan:
    """The cells of grids whose devices are made out.

    Args:
        searches: grids of those whose lines' border is searched, each with its axis.

    Raises:
        RecipeError: a combination that cannot be trained, unless they are to be skipped; or nothing is left.
    """
    recipes, refusals = expand(grids, _require_runnable)
    if refusals and (not skip_invalid or not recipes):
        first = refusals[0]
        options = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in first.values.items())
        raise RecipeError(
            f"{len(refusals)} of {len(refusals) + len(recipes)} combinations cannot be trained, such as {options}: "
            f"{first.reason} Change the grid, or leave them out with --skip-invalid."
        )
    return SweepPlan(grids=grids, recipes=recipes, refusals=refusals, searches=searches)


def run_sweep(plan: SweepPlan, folder: SweepFolder, settings: RunnerSettings, watcher: Watcher) -> SweepResult:
    """Run what is not finished, then search the borders.

    Raises:
        RecipeError: several jobs, though cells are timed.
        RunDirectoryError: the folder is another sweep's, or no sweep's.
        SweepInterruptedError: on Ctrl-C.
    """
    _refuse_timed_jobs(plan, settings)
    folder.make()
    with folder.locked():
        folder.heal()
        folder.note_grids([grid.to_json() for grid in plan.grids])
        runner = Runner(folder, settings, watcher)
        left_out = runner.run(plan.recipes)
        borders = [
            border
            for axis, grid in plan.searches
            for border in find_borders(runner, expand([grid], _require_runnable)[0], axis)
        ]
        rows = folder.rows()
    keys = [key for key in runner.asked if key in rows]
    return SweepResult(
        plan=plan,
        folder=folder,
        cells=tuple(runner.cells[key] for key in keys),
        rows=tuple(rows[key] for key in keys),
        borders=tuple(borders),
        left_out=left_out,
    )


def _require_runnable(recipe: TrainingRecipe) -> None:
    require_supported(recipe, command="simulate" if recipe.device is Device.SIMULATED else "sweep")


def _refuse_timed_jobs(plan: SweepPlan, settings: RunnerSettings) -> None:
    if settings.jobs > 1 and any(recipe.device is not Device.SIMULATED for recipe in plan.recipes):
        raise RecipeError(
            f"--jobs {settings.jobs}: measured cells run one at a time, or they time each other. Leave it out."
        )
