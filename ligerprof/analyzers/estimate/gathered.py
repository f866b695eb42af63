"""The weights that ZeRO-3 has gathered while the head and the layers run, in elements.

The first step gathers weights on demand. From the second step on, the order of modules is known, and each module's call
prefetches weights in that order until `stage3_max_live_parameters` are live; the weight that reaches the limit exceeds
it (partitioned_param_coordinator.py, `_fetch_sub_module_impl`). A module releases its weights after its backward, and
after its forward unless it runs again within `stage3_max_reuse_distance` (`__params_to_release`).
Persistent weights are always live, and DeepSpeed does not count them.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, takewhile

from ligerprof.analyzers.estimate.meter import Meter
from ligerprof.analyzers.estimate.partition import weight_width
from ligerprof.analyzers.estimate.places import WHOLE
from ligerprof.analyzers.estimate.tensors import Weight
from ligerprof.models import ParameterShape
from ligerprof.models.architectures import is_in_layer, layer_index
from ligerprof.recipe.deepspeed import zero_settings
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Role


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatCopy:
    """The flat tensor that one call gathers several weights into.

    Each weight is copied out of it when a module waits for the first of them (`AllGatherCoalescedHandle.wait`), and it
    is there until a module has waited for the last.

    Attributes:
        first, last: names of these two weights; None if they are in another layer.
    """

    size_bytes: int
    first: str | None
    last: str | None


class FlatCopies:
    """The flat tensors that are on a meter while a layer runs forward.

    Args:
        copies: of the layer.
        width: bytes of an element.
        names: the names of weights in the copies, by the identity of the weight that is read in their place.
    """

    def __init__(self, meter: Meter, copies: Iterable[FlatCopy], names: Mapping[int, str]) -> None:
        self._meter, self._copies, self._names = meter, list(copies), names
        self._held = [copy for copy in self._copies if copy.first is None]
        self._add(self._held)

    def read(self, weight: Weight) -> None:
        """A module waits for a weight."""
        name = self._names.get(id(weight))
        if name is not None:
            self._drop([copy for copy in self._held if copy.last == name])
            begun = [copy for copy in self._copies if copy.first == name]
            self._held += begun
            self._add(begun)

    def end(self) -> None:
        """The layer has run."""
        self._drop(self._held)

    def _drop(self, copies: Collection[FlatCopy]) -> None:
        self._add(copies, times=-1)
        self._held = [copy for copy in self._held if copy not in copies]

    def _add(self, copies: Collection[FlatCopy], times: int = 1) -> None:
        if copies:
            self._meter.add({Role.COMMUNICATION: sum(copy.size_bytes for copy in copies)}, times, WHOLE)


class NothingGathered:
    """One rank with its weights on the GPU: its partitions are whole, and used in place (`NoGatherHandle`)."""

    def at_loss(self) -> int:
        """Live during the loss."""
        return 0

    def in_layers(self, passed: int) -> int:  # noqa: ARG002 - of the classes below
        """Live during backward of the decoder layers, or of the embedding once all layers have `passed`."""
        return 0

    def while_read(self) -> dict[str, int]:
        """In addition, while an operation reads a weight, by its name."""
        return {}

    def largest_call(self) -> int:
        """The most that one module's call prefetches after the head has released its weight."""
        return 0

    def flat_copies(self, layer: int) -> tuple[FlatCopy, ...]:  # noqa: ARG002 - of the classes below
        """The flat tensors of calls that gather weights of a layer, while that layer runs forward."""
        return ()

    def released(self) -> dict[str, int]:
        """The bytes of each weight of a layer that its module's backward releases, if no other one takes its place."""
        return {}


class GatheredOnDemand(NothingGathered):
    """The first step: each module's weights while it runs, and the head's throughout if the model holds it.

    Of a traced model, a layer's weights while it runs.
    """

    def __init__(self, recipe: TrainingRecipe) -> None:
        parameters, layers = recipe.spec.parameters, recipe.spec.layers
        head, is_traced = _head(recipe), recipe.spec.tape is not None
        self._head = head.elements if _head_stays(recipe) else 0
        self._read = {item.name: item.elements for item in ([head] if is_traced else parameters)}
        self._read[head.name] -= self._head
        in_layers = sum(item.elements for item in parameters if is_in_layer(item.name))
        self._layer = in_layers // layers if is_traced else 0
        self._embedding = parameters[0].elements
        self._layer_count = layers

    def at_loss(self) -> int:
        """The head's weight."""
        return self._head

    def in_layers(self, passed: int) -> int:
        """The head's weight, and the embedding's, which a backward without inputs leaves."""
        return self._head + self._layer if passed < self._layer_count else max(self._head, self._embedding)

    def while_read(self) -> dict[str, int]:
        """The weight itself."""
        return self._read


class Gathered(NothingGathered):
    """Steady steps: weights are prefetched in the order in which backward reads them."""

    def __init__(self, recipe: TrainingRecipe) -> None:
        settings, parameters = zero_settings(recipe), recipe.spec.parameters
        self._most_live = settings["stage3_max_live_parameters"]
        self._call = settings["stage3_prefetch_bucket_size"]
        self._smallest = settings["stage3_param_persistence_threshold"] + 1
        self._persistent = sum(item.elements for item in parameters if item.elements < self._smallest)
        self._layer_count, self._width = recipe.spec.layers, weight_width(recipe)
        self._layers = [item for item in parameters if is_in_layer(item.name)]
        self._embeddings = parameters[: parameters.index(self._layers[0])]
        self._calls = list(self._make_calls(recipe))
        self._head, self._head_stays = _head(recipe), _head_stays(recipe)
        # the head's backward follows its forward
        self._head_waits = self._head_stays or settings["stage3_max_reuse_distance"] > 0
        self._known: dict[int, int] = {}

    def at_loss(self) -> int:
        """Live during head and loss: the head's weight and those of the nearest layers."""
        nothing_fits = self._most_live == 0 and not self._head_waits
        return self._persistent + (
            0 if nothing_fits else sum(item.elements for item in self._ahead(0, with_head=self._head_waits))
        )

    def while_read(self) -> dict[str, int]:
        """The head's weight, unless it is live already."""
        return {} if self._head_waits else {self._head.name: self._head.elements}

    def in_layers(self, passed: int) -> int:
        """Live during backward of the decoder layers, after `passed` of them have released their weights.

        The head has released its weight too. The last weight that is gathered instead is the embedding's, of any
        size; with tied weights it is the same tensor.
        """
        if passed not in self._known:
            ahead = self._ahead(passed, with_head=self._head_stays)
            self._known[passed] = self._persistent + sum(item.elements for item in ahead)
        return self._known[passed]

    def largest_call(self) -> int:
        """The most that one module's call gathers after the head has released its weight."""
        if self._head_stays:
            return 0
        largest = called = 0
        there = set(self._ahead(0, with_head=True)) - {self._head}
        for item in self._ahead(0, with_head=False):
            if item not in there:
                called = item.elements + (called if called < self._call else 0)
                largest = max(largest, called)
        return largest

    def flat_copies(self, layer: int) -> tuple[FlatCopy, ...]:
        """The flat tensors of the calls that gather weights of a layer, while that layer runs forward."""

        def in_layer(item: ParameterShape) -> str | None:
            return item.name if layer_index(item.name) == layer else None

        return tuple(
            FlatCopy(
                size_bytes=self._width * sum(item.elements for item in call),
                first=in_layer(call[0]),
                last=in_layer(call[-1]),
            )
            for call in self._calls
            if any(map(in_layer, call))
        )

    def released(self) -> dict[str, int]:
        """The bytes of each weight of a layer that its module's backward releases, if no other one takes its place."""
        if sum(item.elements for item in self._order(0, with_head=False)) >= self._most_live:
            return {}
        return {item.name: self._width * item.elements for item in self._layers if item.elements >= self._smallest}

    def _make_calls(self, recipe: TrainingRecipe) -> Iterator[list[ParameterShape]]:
        """The calls in forward that gather several weights."""
        call: list[ParameterShape] = []
        for item in (*(item for item in recipe.spec.parameters if item.elements >= self._smallest), None):
            if item is None or sum(other.elements for other in call) >= self._call:
                if len(call) > 1 and recipe.gpus > 1:
                    yield call
                call = []
            if item is not None:
                call.append(item)

    def _ahead(self, passed: int, *, with_head: bool) -> Iterator[ParameterShape]:
        """Weights up to the one that reaches the limit."""
        elements = 0
        for item in self._order(passed, with_head=with_head):
            # a weight that is needed now is gathered even above the limit
            if elements and elements >= self._most_live:
                return
            elements += item.elements
            yield item

    def _order(self, passed: int, *, with_head: bool) -> Iterator[ParameterShape]:
        left = len(self._layers) * (self._layer_count - passed) // self._layer_count
        after: Iterable[ParameterShape] = chain(reversed(self._layers[:left]), reversed(self._embeddings))
        if with_head:
            after = chain([self._head], (item for item in after if item is not self._head))
        return (item for item in after if item.elements >= self._smallest)


def _head(recipe: TrainingRecipe) -> ParameterShape:
    parameters = recipe.spec.parameters
    if recipe.spec.tape is not None:
        # the last matrix after the layers; a tied one is the embedding
        outside = takewhile(lambda item: not is_in_layer(item.name), reversed(parameters))
        return next((item for item in outside if len(item.shape) > 1), parameters[0])
    return parameters[0] if recipe.spec.tied_embeddings else parameters[-1]


def _head_stays(recipe: TrainingRecipe) -> bool:
    """Whether the head's weight is live throughout: liger-kernel's fused loss reads it in the model's own call."""
    return recipe.providers.get("flce") == "liger"
