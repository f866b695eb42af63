"""The parts of a model that bytes belong to: embedding, decoder layers, head and loss, or the whole model."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ligerprof.analyzers.estimate.masks import layer_memory_kinds
from ligerprof.models.module_names import is_embedding_weight, layer_index
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import MemoryBreakdown

EMBEDDING, HEAD, WHOLE = "embedding", "head and loss", "whole model"

# (index, number of layers that it represents) of each decoder layer that the estimate runs
TracedLayers = Sequence[tuple[int, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceBytes:
    """The bytes of one part of the model at the peak.

    Attributes:
        name: the part, such as `layers 1 to 14`.
        count: number of layers in this part, which are alike; 1 for other parts.
        roles: bytes of all its layers.
    """

    name: str
    count: int
    roles: MemoryBreakdown

    def to_json(self) -> dict[str, Any]:
        """An entry of `layers` in the estimate's JSON, without empty roles."""
        roles = {word: size_bytes for word, size_bytes in self.roles.to_json().items() if size_bytes}
        return {"name": self.name, "count": self.count, "bytes": self.roles.total_bytes, "roles": roles}


def traced_layers(recipe: TrainingRecipe) -> TracedLayers:
    """The layers to run: of successive layers that are alike the first, one for all in the middle, and the last.

    Every layer represents itself if only some are checkpointed or still have activations on the GPU.
    """
    layers = range(recipe.spec.layers)
    if recipe.checkpoint_every > 1 or recipe.activation_offload:
        return [(index, 1) for index in layers]
    kinds = layer_memory_kinds(recipe)
    traced: list[tuple[int, int]] = []
    for _, run in groupby(layers, key=kinds.__getitem__):
        first, *others = run
        traced.append((first, 1))
        if len(others) > 1:
            traced.append((first + 1, len(others) - 1))
        if others:
            traced.append((others[-1], 1))
    return traced


def layer_place(index: int, times: int) -> str:
    """The name of a traced layer and the layers that it represents."""
    return f"layer {index}" if times == 1 else f"layers {index} to {index + times - 1}"


def places(traced: TracedLayers) -> Iterator[tuple[str, int]]:
    """All parts of a model and their numbers of layers, in forward order."""
    yield EMBEDDING, 1
    for index, times in traced:
        yield layer_place(index, times), times
    yield HEAD, 1
    yield WHOLE, 1


def weight_place(name: str, traced: TracedLayers) -> str:
    """The part of the model that a parameter belongs to."""
    if is_embedding_weight(name):
        return EMBEDDING
    index = layer_index(name)
    if index is None:
        return HEAD
    return next(layer_place(first, times) for first, times in traced if index < first + times)


def spread(size_bytes: int, parts: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Divide bytes among places in proportion to `parts`; the remainder belongs to the whole model."""
    whole, rest_bytes = sum(parts.values()), size_bytes
    for place, part in parts.items():
        share_bytes = size_bytes * part // whole if whole else 0
        rest_bytes -= share_bytes
        yield place, share_bytes
    yield WHOLE, rest_bytes


def sums(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Sums by place."""
    totals: dict[str, int] = {}
    for place, number in pairs:
        totals[place] = totals.get(place, 0) + number
    return totals
