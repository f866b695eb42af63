"""Search for the largest batch or sequence that runs, by running the steps around it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ligerprof.analyzers.estimate import estimate
from ligerprof.analyzers.search.fit import SEQ_STEP, find_border
from ligerprof.errors import LigerprofError, RecipeError
from ligerprof.recipe.categories import Axis
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.recipe.usable_memory import find_limit
from ligerprof.runs.sweep.cells import Cell, CellStatus
from ligerprof.runs.sweep.grid import cell_key
from ligerprof.runs.sweep.runner import Runner

UNITS: dict[Axis, int] = {Axis.BATCH: 1, Axis.SEQ: SEQ_STEP}

# a value that fits and one that does not; None if unknown
Edges = tuple[int | None, int | None]


class _ProbeFailedError(LigerprofError):
    """A step of the search failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Border:
    """Where memory ends along one axis, with all other options fixed.

    Attributes:
        largest: the largest value that ran; None if none did.
        smallest_oom: the smallest value that was out of memory; None if the search did not find one.
        reason: why the search ended before the two were adjacent, or None.
        recipe: a step of the line; its value along the axis does not matter.
    """

    axis: Axis
    largest: int | None
    smallest_oom: int | None
    reason: str | None = None
    recipe: TrainingRecipe


def find_borders(runner: Runner, recipes: Iterable[TrainingRecipe], axis: Axis) -> tuple[Border, ...]:
    """The border of every line of the recipes; the folder's finished cells narrow the search.

    Raises:
        SweepInterruptedError: on Ctrl-C.
    """
    lines: dict[str, TrainingRecipe] = {}
    for recipe in recipes:
        lines.setdefault(_line(recipe, axis), recipe)
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
    line = _line(recipe, axis)
    return edges((cell for cell in cells if _line(cell.recipe, axis) == line), axis)


def largest_fitting(fits: Callable[[int], bool], guess: int, unit: int, known: Edges = (None, None)) -> int | None:
    """The largest multiple of `unit` that fits, or None; every value below one that fits is assumed to fit.

    Args:
        fits: called at most once per value, and only for values between the known ones.
        guess: where to start.
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


def _line(recipe: TrainingRecipe, axis: Axis) -> str:
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
