"""The parts of a model that bytes belong to: embedding, decoder layers, head and loss, or the whole model."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ligerprof.analyzers.estimate.traced import TracedLayers, layer_of
from ligerprof.models.architectures import is_embedding_weight
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import MemoryBreakdown

EMBEDDING, HEAD, WHOLE = "embedding", "head and loss", "whole model"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceBytes:
    """The bytes of one part of the model at the peak.

    Attributes:
        name: the part, such as `layers 1 to 14` or `layers 4, 8, ..., 40`.
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


def places(traced: TracedLayers) -> Iterator[tuple[str, int]]:
    """All parts of a model and their numbers of layers, in forward order."""
    yield EMBEDDING, 1
    for repetition in traced:
        for index in repetition.indices:
            yield repetition.place(index), repetition.times
    yield HEAD, 1
    yield WHOLE, 1


def weight_place(recipe: TrainingRecipe, name: str, traced: TracedLayers) -> str:
    """The part of the model that a parameter belongs to."""
    index = layer_of(recipe, name)
    if is_embedding_weight(name) and (recipe.spec.tape is None or index is None):
        return EMBEDDING
    if index is None:
        return HEAD
    repetition = next(item for item in traced if index < item.end)
    return repetition.place(repetition.representative(index))


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
