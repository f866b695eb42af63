"""Which weights ZeRO-3 has gathered while the head and the layers run, counted in elements.

In the first step they are gathered when they are needed. From the second step on the order of modules is known.
Every module's call then gathers weights ahead, in the order in which they are asked for next, until
`stage3_max_live_parameters` are there; the weight that reaches the limit goes over it
(partitioned_param_coordinator.py, `_fetch_sub_module_impl`). A module gives its weights back when its backward has
run. Weights that persist are always there, and DeepSpeed does not count them.
"""

from collections.abc import Iterable, Iterator
from itertools import chain

from ligerprof.models import ParameterShape
from ligerprof.models.module_names import is_in_layer
from ligerprof.recipe.deepspeed import zero_settings
from ligerprof.recipe.training import TrainingRecipe


class GatheredOnDemand:
    """What the first step holds: a layer's weights while it runs, the head's where the model holds it."""

    def __init__(self, recipe: TrainingRecipe) -> None:
        parameters, layers = recipe.spec.parameters, recipe.spec.layers
        head = _head(recipe)
        self.head_name, self._head_elements = head.name, head.elements
        self._head = head.elements if _head_stays(recipe) else 0
        self._layer = sum(item.elements for item in parameters if is_in_layer(item.name)) // layers
        self._embedding = parameters[0].elements
        self._layer_count = layers

    def at_loss(self) -> int:
        """While the loss runs."""
        return self._head

    def in_head(self) -> int:
        """Beyond that, while the head's own product runs: its weight."""
        return self._head_elements - self._head

    def in_layers(self, passed: int) -> int:
        """While decoder layers run backward, or the embedding where all have `passed`."""
        return self._head + self._layer if passed < self._layer_count else max(self._head, self._embedding)

    def largest_call(self) -> int:
        """Nothing is gathered ahead."""
        return 0


class Gathered:
    """The weights of a recipe's model, in the order in which its backward asks for them."""

    def __init__(self, recipe: TrainingRecipe) -> None:
        settings, parameters = zero_settings(recipe), recipe.spec.parameters
        self._most_live = settings["stage3_max_live_parameters"]
        self._call = settings["stage3_prefetch_bucket_size"]
        self._smallest = settings["stage3_param_persistence_threshold"] + 1
        self._persistent = sum(item.elements for item in parameters if item.elements < self._smallest)
        self._layer_count = recipe.spec.layers
        self._layers = [item for item in parameters if is_in_layer(item.name)]
        self._embeddings = parameters[: parameters.index(self._layers[0])]
        self._head, self._head_stays = _head(recipe), _head_stays(recipe)
        self.head_name = self._head.name
        self._known: dict[int, int] = {}

    def at_loss(self) -> int:
        """What is there while head and loss run: the head's weight and those of the layers next to it."""
        return self._persistent + sum(item.elements for item in self._ahead(0, with_head=True))

    def in_head(self) -> int:
        """Nothing beyond that while the head's own product runs: its weight is gathered already."""
        return 0

    def in_layers(self, passed: int) -> int:
        """What is there while decoder layers run backward, `passed` of which have given their weights back.

        The head has given back its weight as well, and what is gathered in its place ends with the embedding,
        however large. With tied weights that is the very same, over a limit that the layers have all but reached.
        """
        if passed not in self._known:
            ahead = self._ahead(passed, with_head=self._head_stays)
            self._known[passed] = self._persistent + sum(item.elements for item in ahead)
        return self._known[passed]

    def largest_call(self) -> int:
        """The most that one module's call gathers once the head has given its weight back."""
        if self._head_stays:
            return 0
        largest = called = 0
        there = set(self._ahead(0, with_head=True)) - {self._head}
        for item in self._ahead(0, with_head=False):
            if item not in there:
                called = item.elements + (called if called < self._call else 0)
                largest = max(largest, called)
        return largest

    def _ahead(self, passed: int, *, with_head: bool) -> Iterator[ParameterShape]:
        """Weights up to the one that reaches the limit."""
        elements = 0
        for item in self._order(passed, with_head=with_head):
            # a weight that is needed is gathered whatever the limit says
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
    return parameters[0] if recipe.spec.tied_embeddings else parameters[-1]


def _head_stays(recipe: TrainingRecipe) -> bool:
    """liger-kernel's fused loss reads the head's weight in the model's own call, which ends with the step."""
    return recipe.provider == "liger" and "flce" in recipe.kernels
