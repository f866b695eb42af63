"""Draw how checkpoints and the loss's [T, V] tensors grow with batch and sequence, by the analytic estimate."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ligerprof.analyzers.estimate import estimate
from ligerprof.errors import RecipeError
from ligerprof.recipe.categories import Axis
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.reports.figures.series import AXIS_TITLES, Setting, describe_setting
from ligerprof.reports.figures.style import ROLE_LOOKS, LineLook, drawing, mark_limit, mark_sizes
from ligerprof.roles import Role
from ligerprof.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANEL_INCHES = 1.75
_AXES_INCHES = 2.8
_LOGITS = LineLook(ROLE_LOOKS[Role.LOGITS].color, "o")
_CHECKPOINTS = LineLook(ROLE_LOOKS[Role.CHECKPOINTS].color, "s", (0, (4, 1.5)))


def draw_logits(recipe: TrainingRecipe, sizes: Mapping[Axis, Sequence[int]]) -> "Figure":
    """Draw two panels: over batch at the recipe's sequence, and over sequence at its batch.

    Args:
        sizes: batches and sequences to estimate, ascending.

    Raises:
        RecipeError: the recipe has no checkpointing, so there is nothing to compare the logits with.
        UnsupportedError, UnknownModelError: the estimate does not cover the recipe.
    """
    if not recipe.checkpointing:
        raise RecipeError("planes: no checkpoints to compare the logits with. Drop --no-checkpointing.")
    setting = Setting(recipe=recipe, gpu="", cells=())
    title = "Checkpoints and the loss's [T, V] tensors (tokens x vocabulary), ESTIMATED analytically"
    with drawing(_PANEL_INCHES * len(Axis), title, describe_setting(setting, along=tuple(Axis))) as figure:
        for axes, axis in zip(figure.subplots(len(Axis), 1), Axis, strict=True):
            _draw_panel(axes, recipe, axis, sizes[axis])
    return figure


def _draw_panel(axes: "Axes", recipe: TrainingRecipe, axis: Axis, sizes: Sequence[int]) -> None:
    found = [estimate(recipe.resized(axis, size)) for size in sizes]
    logits = [one.logits_bytes / GIB for one in found]
    checkpoints = [one.checkpoint_bytes / GIB for one in found]
    axes.plot(sizes, logits, label="[T, V] logits tensors", **_LOGITS.arguments())
    axes.plot(sizes, checkpoints, label="checkpoints", **_CHECKPOINTS.arguments())
    if recipe.memory_limit_bytes is not None:
        mark_limit(axes, recipe.memory_limit_bytes)
    mark_sizes(axes, sizes, width_inches=_AXES_INCHES)
    constant = f"at sequence {recipe.seq}" if axis is Axis.BATCH else f"at batch {recipe.batch}"
    axes.set_xlabel(f"{AXIS_TITLES[axis]}, {constant}")
    axes.set_ylabel("GiB")
    # both grow with the tokens: on logarithmic axes they are straight lines, and their distance is their ratio
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
