"""What a forward pass holds for backward, layer by layer, apart from weights and optimizer states."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from ligerprof.analyzers.estimate.hooks import Hooks, Module, Part
from ligerprof.analyzers.estimate.meter import Meter
from ligerprof.analyzers.estimate.micro_batch import MicroBatch
from ligerprof.analyzers.estimate.places import HEAD
from ligerprof.analyzers.estimate.static import make_weights
from ligerprof.analyzers.estimate.step import new_meter
from ligerprof.analyzers.estimate.traced import traced_layers
from ligerprof.errors import UnknownModelError
from ligerprof.kernels.registry import find_kernel_set
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Role

Held = Mapping[Role, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptBytes:
    """Bytes by role that a forward pass leaves for backward.

    Attributes:
        layers: of each decoder layer.
        casts: bytes of each layer that are freed when autocast ends: copies of weights that nothing saves.
        head: of what follows the layers, up to the loss.
        others: of the embedding, and of what all layers share.
    """

    layers: tuple[Held, ...]
    casts: tuple[int, ...]
    head: Held
    others: Held


# a recording is compared with recipes, and the one that is found then with each change to it
@lru_cache(maxsize=16)
def kept_bytes(recipe: TrainingRecipe) -> KeptBytes:
    """Run the forward pass of a steady step as the estimate does.

    Raises:
        LigerprofError: the estimate does not cover the architecture or an option.
    """
    if recipe.spec.no_estimate_reason is not None:
        raise UnknownModelError(f"{recipe.spec.name}: {recipe.spec.no_estimate_reason}.")
    weights = make_weights(recipe)
    meter = new_meter(recipe)
    hooks = _AtLoss(meter)
    MicroBatch(recipe, weights, find_kernel_set(recipe.providers, recipe.spec), meter, hooks).forward()
    layers: list[Held] = []
    casts: list[int] = []
    held = meter.held_places
    for repetition in traced_layers(recipe):
        left = [held.pop(name, {}) for name in repetition.places]
        before = [hooks.held.get(name, {}) for name in repetition.places]
        freed = [sum(then.values()) - sum(now.values()) for then, now in zip(before, left, strict=True)]
        times = repetition.times
        layers += [{role: size_bytes // times for role, size_bytes in roles.items()} for roles in left] * times
        casts += [size_bytes // times for size_bytes in freed] * times
    head = held.pop(HEAD, {})
    others = sum((Counter(roles) for roles in held.values()), start=Counter[Role]())
    return KeptBytes(layers=tuple(layers), casts=tuple(casts), head=head, others=others)


class _AtLoss(Hooks):
    """Notes what is held when the model has run, before autocast ends."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self.held: Mapping[str, Held] = {}

    def leave(self, module: Module) -> None:
        if module is Part.ROOT:
            self.held = self._meter.held_places
