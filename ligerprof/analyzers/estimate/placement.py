"""What stays on the GPU from step to step, and what the optimizer's step adds: for plain torch."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ligerprof.analyzers.estimate.meter import UnsplitRemainders
from ligerprof.analyzers.estimate.tape import Weight
from ligerprof.recipe.categories import Optimizer
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Role
from ligerprof.torch_memory.allocator.caching import CachingAllocator
from ligerprof.torch_memory.allocator.settings import parse_allocator_settings
from ligerprof.torch_memory.allocator.sizes import SMALL_REQUEST_BYTES
from ligerprof.torch_memory.low_bit import (
    EIGHT_BIT_TABLE_SIZES,
    GaloreTensor,
    eight_bit_state_sizes,
    galore_projects,
    galore_update_bytes,
)
from ligerprof.torch_memory.optimizers import state_sizes as parameter_state_sizes
from ligerprof.torch_memory.optimizers import step_copies

Bytes = Mapping[Role, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where weights, gradients and states are, by role.

    Attributes:
        resident: there from before the first step.
        states: there once the optimizer has stepped.
        running: there while forward and backward run.
        in_layers: there beyond `running` while decoder layers run backward; what the layers behind have freed
            by then is taken off.
        arriving: made and dropped as the first of them runs backward.
        reduction: there from backward's first gradient until backward ends.
        bucket_copies: made and dropped while decoder layers run backward, when gradients are reduced; what
            the layers behind have freed by then is taken off.
        reductions: the same by the parameter whose gradient comes then.
        gathered: by parameter, what is gathered beyond `running` while an operation reads it.
        last_reduction: there in place of `running` when backward has run, as the last gradients are reduced.
        gradient_share: the part of each gradient that stays on this GPU once it is whole.
        gradients_at_update: what is left of the gradients when the optimizer steps; None: all that
            backward left.
        updates: what the optimizer's step makes and drops, moment by moment; in a first step with the
            states that it has made by then.
        states_remainders, update_remainders: what the allocator may leave of those blocks larger than was asked.
    """

    resident: Bytes
    states: Bytes
    updates: Sequence[Bytes]
    states_remainders: UnsplitRemainders = field(default_factory=lambda: UnsplitRemainders(blocks=0, counted_bytes=0))
    update_remainders: UnsplitRemainders = field(default_factory=lambda: UnsplitRemainders(blocks=0, counted_bytes=0))
    running: Bytes = field(default_factory=dict)
    in_layers: Bytes = field(default_factory=dict)
    arriving: Bytes = field(default_factory=dict)
    reduction: Bytes = field(default_factory=dict)
    bucket_copies: Bytes = field(default_factory=dict)
    reductions: Mapping[str, int] = field(default_factory=dict)
    gathered: Mapping[str, int] = field(default_factory=dict)
    last_reduction: Bytes = field(default_factory=dict)
    gradient_share: float = 1.0
    gradients_at_update: int | None = None


def torch_placement(recipe: TrainingRecipe, weights: Iterable[Weight], *, first: bool) -> Placement:
    """Weights, optimizer states and foreach AdamW's square roots, block by block."""
    weights = list(weights)
    trainable = [weight for weight in weights if weight.trainable]
    device = _EmptyDevice(recipe)
    stored = [size for weight in weights for size in weight.stored_sizes]
    resident, _ = device.place(Role.PARAMETERS, stored)
    states, states_remainders = device.place(Role.OPTIMIZER_STATES, list(state_sizes(recipe, trainable)))
    update, update_remainders = device.place(Role.OPTIMIZER_TEMPORARIES, _update_sizes(recipe, trainable))
    decomposition_bytes = max((tensor.decomposition_bytes for tensor in _galore_tensors(recipe, trainable)), default=0)
    decomposition = {Role.OPTIMIZER_TEMPORARIES: decomposition_bytes}
    return Placement(
        resident=resident,
        states=states,
        updates=(Counter(states) + Counter(decomposition), Counter(states) + Counter(update)) if first else (update,),
        states_remainders=states_remainders,
        update_remainders=update_remainders,
    )


def state_sizes(recipe: TrainingRecipe, trainable: Iterable[Weight]) -> Iterator[int]:
    """Bytes of each tensor that the optimizer keeps on the GPU."""
    if recipe.optimizer is Optimizer.GALORE:
        for tensor in _galore_tensors(recipe, trainable):
            yield from tensor.state_sizes
    elif recipe.optimizer is Optimizer.ADAMW_8BIT:
        yield from EIGHT_BIT_TABLE_SIZES
        for weight in trainable:
            yield from eight_bit_state_sizes(weight.elements)
    else:
        for weight in trainable:
            yield from parameter_state_sizes(recipe.optimizer, weight.size_bytes)


def _update_sizes(recipe: TrainingRecipe, trainable: list[Weight]) -> list[int]:
    """Bytes of each tensor that the optimizer's step makes and drops."""
    if recipe.optimizer is Optimizer.GALORE:
        return [galore_update_bytes(_galore_tensors(recipe, trainable))]
    return [weight.size_bytes for weight in trainable] * step_copies(recipe.optimizer)


def _galore_tensors(recipe: TrainingRecipe, trainable: Iterable[Weight]) -> Iterator[GaloreTensor]:
    """The weights as GaLore sees them; none with another optimizer."""
    for weight in trainable if recipe.optimizer is Optimizer.GALORE else ():
        projected = galore_projects(in_layer=weight.in_layer, dimensions=len(weight.shape))
        yield GaloreTensor(
            shape=weight.shape,
            elements=weight.elements,
            width=weight.width,
            rank=recipe.galore_rank if projected else None,
        )


class _EmptyDevice:
    """Blocks that come one after another on an empty device and stay.

    So the allocator's rules tell exactly which of them it rounds up and which it does not split.
    """

    def __init__(self, recipe: TrainingRecipe) -> None:
        settings = parse_allocator_settings(recipe.alloc_conf)
        self._rules, self._allocator = settings.rules, CachingAllocator(settings=settings)

    def place(self, role: Role, sizes: list[int]) -> tuple[Bytes, UnsplitRemainders]:
        """Requested bytes under `role`, what their blocks take beyond that, and how sure that is."""
        before_bytes = self._allocator.allocated_bytes
        for size_bytes in sizes:
            self._allocator.malloc(size_bytes)
        held_bytes = self._allocator.allocated_bytes - before_bytes
        requested_bytes = sum(sizes)
        remainders = UnsplitRemainders(
            blocks=sum(size_bytes > SMALL_REQUEST_BYTES for size_bytes in sizes),
            counted_bytes=held_bytes - sum(self._rules.round_request(size_bytes) for size_bytes in sizes),
        )
        return {role: requested_bytes, Role.ALLOCATOR_ROUNDING: held_bytes - requested_bytes}, remainders
