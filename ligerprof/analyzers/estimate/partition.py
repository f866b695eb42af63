"""How ZeRO divides parameters between ranks, and stage 3 each rank's part into groups; all in elements."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ligerprof.analyzers.estimate.tape import Weight
from ligerprof.recipe.deepspeed import zero_settings
from ligerprof.recipe.training import TrainingRecipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Elements:
    """Parameters of the model, counted.

    Attributes:
        whole: all of them.
        share: this GPU's part of all of them.
        trained: all that train.
        trained_share: this GPU's part of those that train.
        largest: those of the largest tensor that trains.
        groups: this GPU's part of those that train, as stage 3's optimizer takes them one after the other.
    """

    whole: int
    share: int
    trained: int
    trained_share: int
    largest: int
    groups: tuple[int, ...]


def count_elements(recipe: TrainingRecipe, weights: Iterable[Weight]) -> Elements:
    """Count a model's weights under the recipe's number of GPUs."""
    weights = list(weights)
    trained = [weight.elements for weight in weights if weight.trainable]
    whole = sum(weight.elements for weight in weights)
    return Elements(
        whole=whole,
        share=part(recipe, whole),
        trained=sum(trained),
        trained_share=part(recipe, sum(trained)),
        largest=max(trained),
        groups=tuple(_groups(recipe, trained)),
    )


def part(recipe: TrainingRecipe, elements: int) -> int:
    """One rank's part, padded to be as large as any other's."""
    return -(-elements // recipe.gpus)


def _groups(recipe: TrainingRecipe, trained: Iterable[int]) -> Iterator[int]:
    """Parameters in their order until `sub_group_size` is reached (stage3.py, _create_fp16_sub_groups)."""
    most, filled = zero_settings(recipe)["sub_group_size"], 0
    for elements in trained:
        filled += part(recipe, elements)
        if filled >= most:
            yield filled
            filled = 0
    if filled:
        yield filled
