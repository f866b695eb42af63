"""How ZeRO divides parameters among ranks, and stage 3 each rank's share into groups; all in elements."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ligerprof.analyzers.estimate.tensors import Weight
from ligerprof.recipe.deepspeed import zero_settings
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.torch_memory.dtypes import DTYPE_BYTES

# engine.py, MEMORY_OPT_ALLREDUCE_SIZE
_REDUCED_ELEMENTS = 500_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Elements:
    """Element counts of the model's parameters.

    Attributes:
        whole: all parameters.
        share: this GPU's share of all parameters.
        trained: trainable parameters.
        trained_share: this GPU's share of the trainable parameters.
        largest: the largest trainable tensor.
        most_reduced: the most trainable parameters whose gradients stage 0 in fp32 reduces at a time.
        groups: this GPU's share of the trainable parameters, in the groups that stage 3's optimizer steps in turn.
    """

    whole: int
    share: int
    trained: int
    trained_share: int
    largest: int
    most_reduced: int
    groups: tuple[int, ...]


def count_elements(recipe: TrainingRecipe, weights: Iterable[Weight]) -> Elements:
    """Count a model's weights for the recipe's number of GPUs."""
    weights = list(weights)
    trained = [weight.elements for weight in weights if weight.trainable]
    whole = sum(weight.elements for weight in weights)
    return Elements(
        whole=whole,
        share=part(recipe, whole),
        trained=sum(trained),
        trained_share=part(recipe, sum(trained)),
        largest=max(trained),
        most_reduced=max(_reduced(trained)),
        groups=tuple(_groups(recipe, trained)),
    )


def weight_width(recipe: TrainingRecipe) -> int:
    """Bytes per element of weights and of gradients."""
    return DTYPE_BYTES[recipe.weight_dtype]


def _reduced(trained: Iterable[int]) -> Iterator[int]:
    """Fill buckets in parameter order until one exceeds 5e8 elements (engine.py, allreduce_no_retain)."""
    filled = 0
    for elements in trained:
        filled += elements
        if filled > _REDUCED_ELEMENTS:
            yield filled
            filled = 0
    yield filled


def part(recipe: TrainingRecipe, elements: int) -> int:
    """One rank's share, padded to the size of the largest."""
    return -(-elements // recipe.gpus)


def _groups(recipe: TrainingRecipe, trained: Iterable[int]) -> Iterator[int]:
    """Fill groups in parameter order up to `sub_group_size` (stage3.py, _create_fp16_sub_groups)."""
    most, filled = zero_settings(recipe)["sub_group_size"], 0
    for elements in trained:
        filled += part(recipe, elements)
        if filled >= most:
            yield filled
            filled = 0
    if filled:
        yield filled
