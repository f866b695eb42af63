"""Search the largest batch or sequence that runs, by running the steps around it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ligerprof.analyzers.estimate import estimate
from ligerprof.analyzers.search.budget import find_limit
from ligerprof.analyzers.search.fit import SEQ_STEP
from ligerprof.errors import LigerprofError, RecipeError
from ligerprof.recipe.categories import Axis
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.sweep.cells import Cell, CellStatus
from ligerprof.runs.sweep.grid import cell_key
from ligerprof.runs.sweep.runner import Runner
from ligerprof.serialization import select

UNITS: dict[Axis, int] = {Axis.BATCH: 1, Axis.SEQ: SEQ_STEP}
# the first stride away from a guess is this share of it
_STRIDE_SHARE = 16


class _NoAnswerError(LigerprofError):
    """A step of the search failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Border:
    """Where memory ends along one axis, with all other options fixed.

    Attributes:
        recipe: a step of the line; its own value of the axis does not matter.
        largest: the largest value that ran; None if none did.
        smallest_oom: the smallest value that was out of memory; None if the search ended before it found one.
        reason: why the search ended before the two were adjacent, or None.
    """

    recipe: TrainingRecipe
    axis: Axis
    largest: int | None
    smallest_oom: int | None
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        """An entry of `borders` in the sweep's JSON."""
        return select(self, "axis", "largest", "smallest_oom", "reason", "recipe")


def find_borders(runner: Runner, recipes: Iterable[TrainingRecipe], axis: Axis) -> tuple[Border, ...]:
    """The border of every line of the recipes; finished cells of the folder that are on a line count.

    Raises:
        SweepInterruptedError: on Ctrl-C.
    """
    lines: dict[str, TrainingRecipe] = {}
    for recipe in recipes:
        lines.setdefault(_line(recipe, axis), recipe)
    return tuple(_find_border(runner, recipe, axis) for recipe in lines.values())


def edges(cells: Iterable[Cell], axis: Axis) -> tuple[int | None, int | None]:
    """The largest value along an axis that ran, and the smallest above it that was out of memory."""
    ends: dict[CellStatus, list[int]] = {status: [] for status in CellStatus}
    for cell in cells:
        ends[cell.status].append(getattr(cell.recipe, axis))
    largest = max(ends[CellStatus.DONE], default=None)
    lost = (value for value in ends[CellStatus.OOM] if largest is None or value > largest)
    return largest, min(lost, default=None)


def line_edges(cells: Iterable[Cell], recipe: TrainingRecipe, axis: Axis) -> tuple[int | None, int | None]:
    """The edges of the cells that differ from a recipe in one axis alone."""
    line = _line(recipe, axis)
    return edges((cell for cell in cells if _line(cell.recipe, axis) == line), axis)


def bracket(
    fits: Callable[[int], bool], guess: int, unit: int, known: tuple[int | None, int | None] = (None, None)
) -> tuple[int | None, int | None]:
    """The largest multiple of `unit` that fits, and the next multiple.

    Args:
        fits: called once per value; every value below one that fits is assumed to fit.
        guess: the value to start from, rounded down to a multiple.
        known: a value that fits and one that does not, None where unknown.

    Returns:
        The two values; None and `unit` if nothing fits.
    """
    low, high = known
    value = _inside(guess - guess % unit, low, high, unit)
    stride = max(unit, value // _STRIDE_SHARE // unit * unit)
    while high is None or (high - (low or 0)) > unit:
        value = _inside(value, low, high, unit)
        if fits(value):
            low = value
        else:
            high = value
        if low is None:
            value = value - stride
        elif high is None:
            value = value + stride
        else:
            value = (low + high) // 2 // unit * unit
        stride *= 2
    return low, high


def _inside(value: int, low: int | None, high: int | None, unit: int) -> int:
    """The value, moved between the known ones if it lies outside."""
    value = max(value, unit, unit if low is None else low + unit)
    return value if high is None else min(value, high - unit)


def _find_border(runner: Runner, recipe: TrainingRecipe, axis: Axis) -> Border:
    reason = None

    def fits(value: int) -> bool:
        nonlocal reason
        try:
            probe = recipe.resized(axis, value)
        except RecipeError as error:
            # the model has fewer positions
            reason = str(error)
            return False
        return _runs(runner, probe)

    unit = UNITS[axis]
    try:
        known = _aligned(*line_edges(runner.cells.values(), recipe, axis), unit)
        bracket(fits, _guess(recipe, axis, known), unit, known)
    except _NoAnswerError as error:
        reason = str(error)
    largest, smallest_oom = line_edges(runner.cells.values(), recipe, axis)
    return Border(recipe=recipe, axis=axis, largest=largest, smallest_oom=smallest_oom, reason=reason)


def _aligned(low: int | None, high: int | None, unit: int) -> tuple[int | None, int | None]:
    """The two rounded outwards to multiples of `unit`: down from what fits, up from what does not."""
    return (low // unit * unit or None) if low else None, -(-high // unit) * unit if high else None


def _runs(runner: Runner, recipe: TrainingRecipe) -> bool:
    runner.run([recipe])
    cell = runner.finished(recipe)
    if cell is None:
        raise _NoAnswerError(f"{recipe.batch} x {recipe.seq} failed: {runner.cells[cell_key(recipe)].error}")
    return cell.status is CellStatus.DONE


def _line(recipe: TrainingRecipe, axis: Axis) -> str:
    return cell_key(recipe.resized(axis, 1))


def _guess(recipe: TrainingRecipe, axis: Axis, known: tuple[int | None, int | None]) -> int:
    """The border according to the estimate; the recipe's own value if it cannot be estimated."""
    own: int = getattr(recipe, axis)
    try:
        limit_bytes = find_limit(recipe).size_bytes
        low, _ = bracket(
            lambda value: estimate(recipe.resized(axis, value)).peak_bytes <= limit_bytes,
            own,
            UNITS[axis],
            known,
        )
    except LigerprofError:
        return own
    return low or own
