"""A row of the table of suggestions, and the conditions and wordings that rows share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ligerprof.analyzers.suggestions.case import Case
from ligerprof.analyzers.suggestions.program import Framework
from ligerprof.analyzers.suggestions.replayed_change import Edit
from ligerprof.analyzers.suggestions.suggestion import Basis, Cost
from ligerprof.models.architectures import ARCHITECTURES
from ligerprof.roles import Role

if TYPE_CHECKING:
    from ligerprof.recipe.training import TrainingRecipe

TRAINERS = (Framework.TRL, Framework.TRAINER)
YAML = (Framework.AXOLOTL, Framework.LLAMA_FACTORY)

Lines = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One suggestion.

    Attributes:
        applies: whether the change is possible and not made yet.
        edit: its effect; returns None if this cannot be computed.
        how: lines by framework; the first of the program's frameworks that has lines is used.
        skips: frameworks whose lines do not hold for this program.
        recipe: the changed recipe of a step of ours, None if it does not apply.
        basis: how exact the saving is.
        is_whole: whether the saving is exact all the same, for this program.
        keeps_buckets: whether DDP still has buckets after the change.
        condition: what the saving depends on, in a sentence without its period; empty if on nothing.
    """

    name: str
    change: str
    cost: Cost
    cost_reason: str
    without: tuple[Role, ...]
    applies: Callable[[Case], bool]
    edit: Callable[[Case], Edit | None]
    how: Mapping[Framework, Lines]
    skips: Callable[[Case], tuple[Framework, ...]] = field(default=lambda _case: ())
    recipe: "Callable[[TrainingRecipe], TrainingRecipe | None]" = field(default=lambda _recipe: None)
    basis: Basis = Basis.REPLAYED
    is_whole: Callable[[Case], bool] = field(default=lambda _case: False)
    keeps_buckets: bool = True
    condition: str = ""


def for_each(frameworks: tuple[Framework, ...], *lines: str) -> dict[Framework, Lines]:
    """The same lines for several frameworks."""
    return dict.fromkeys(frameworks, lines)


def has(*roles: Role) -> Callable[[Case], bool]:
    """A condition: blocks of some roles exist."""
    return lambda case: len(case.book.blocks(*roles)) > 0


def without(*roles: Role) -> Callable[[Case], Edit]:
    """An effect: blocks of some roles do not exist."""
    return lambda case: case.without(*roles)


def knows_model(case: Case) -> bool:
    """Whether the architecture of a transformers model that runs has a row."""
    return not case.program.model_types.isdisjoint(ARCHITECTURES)


def owns_loop(case: Case) -> bool:
    """Whether the program's own code is the training loop, with accelerate or without a library."""
    return case.program.loop in (None, Framework.ACCELERATE)
