"""What checkpoints and the loss's planes take as batch and sequence grow: two terms of the closed form, no run."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ligerprof.analyzers.estimate import estimate
from ligerprof.errors import RecipeError
from ligerprof.recipe.categories import Axis
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.reports.figures.curves import AXIS_TITLES
from ligerprof.reports.figures.series import Setting, describe_setting
from ligerprof.reports.figures.style import (
    ROLE_LOOKS,
    RULE,
    LineLook,
    mark_sizes,
    new_figure,
    styled,
    write_legend,
    write_title,
)
from ligerprof.roles import Role
from ligerprof.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANEL_INCHES = 1.75
_AXES_INCHES = 2.8
_PLANES = LineLook(ROLE_LOOKS[Role.LOGITS].color, "o")
_CHECKPOINTS = LineLook(ROLE_LOOKS[Role.CHECKPOINTS].color, "s", (0, (4, 1.5)))


def draw_planes(recipe: TrainingRecipe, sizes: Mapping[Axis, Sequence[int]]) -> "Figure":
    """Two panels: against batch at the recipe's sequence, and against sequence at its batch.

    Args:
        recipe: checkpointed, or there is nothing to hold the planes against.
        sizes: at which the closed form is asked, ascending, of each axis.

    Raises:
        RecipeError: the recipe keeps no checkpoints.
        UnsupportedError, UnknownModelError: it has no closed form.
    """
    if not recipe.checkpointing:
        raise RecipeError("planes: there are no checkpoints to hold the logits against. Drop --no-checkpointing.")
    with styled():
        figure = new_figure(_PANEL_INCHES * len(Axis))
        for axes, axis in zip(figure.subplots(len(Axis), 1), Axis, strict=True):
            _draw_panel(axes, recipe, axis, sizes[axis])
        setting = Setting(recipe=recipe, gpu="", cells=())
        write_title(
            figure,
            "Checkpoints and the loss's planes of tokens x vocabulary, ESTIMATED in closed form",
            describe_setting(setting, along=tuple(Axis)),
        )
        write_legend(figure)
    return figure


def _draw_panel(axes: "Axes", recipe: TrainingRecipe, axis: Axis, sizes: Sequence[int]) -> None:
    found = [estimate(recipe.resized(axis, size)) for size in sizes]
    planes = [one.logits_bytes / GIB for one in found]
    checkpoints = [one.checkpoint_bytes / GIB for one in found]
    axes.plot(sizes, planes, label="logits and loss planes", **_PLANES.arguments())
    axes.plot(sizes, checkpoints, label="checkpoints", **_CHECKPOINTS.arguments())
    if recipe.memory_limit_bytes is not None:
        limit = recipe.memory_limit_bytes / GIB
        axes.axhline(limit, color=RULE, linewidth=0.9, linestyle=(0, (6, 3)), label=f"limit, {limit:.3g} GiB")
    mark_sizes(axes, sizes, width_inches=_AXES_INCHES)
    constant = f"at sequence {recipe.seq}" if axis is Axis.BATCH else f"at batch {recipe.batch}"
    axes.set_xlabel(f"{AXIS_TITLES[axis]}, {constant}")
    axes.set_ylabel("GiB")
    # both grow with the tokens: on doubling axes they are straight, and their distance is their ratio
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
