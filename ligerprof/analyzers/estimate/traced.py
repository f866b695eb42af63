"""Which decoder layers the estimate runs, and which other layers each of them represents."""

from collections.abc import Sequence
from dataclasses import dataclass

from ligerprof.analyzers.estimate.masks import layer_memory_kinds
from ligerprof.models.architectures import layer_index
from ligerprof.recipe.training import TrainingRecipe


@dataclass(frozen=True, slots=True)
class Repetition:
    """Successive layers that the estimate runs once for `times` such groups, which follow each other.

    Attributes:
        first: the index of the first layer of the first group, which is the one that runs.
        period: layers of one group.
        times: number of groups.
    """

    first: int
    period: int = 1
    times: int = 1

    @property
    def indices(self) -> range:
        """The layers that run."""
        return range(self.first, self.first + self.period)

    @property
    def end(self) -> int:
        """The index after the last layer of the last group."""
        return self.first + self.period * self.times

    @property
    def places(self) -> tuple[str, ...]:
        """The names of the layers that run."""
        return tuple(self.place(index) for index in self.indices)

    def representative(self, index: int) -> int:
        """The layer that runs in place of the layer `index`."""
        return self.first + (index - self.first) % self.period

    def place(self, index: int) -> str:
        """The name of a layer that runs, and of the layers that it represents."""
        if self.times == 1:
            return f"layer {index}"
        if self.period == 1:
            return f"layers {index} to {index + self.times - 1}"
        named = [str(number) for number in range(index, self.end, self.period)]
        return f"layers {', '.join(named if self.times < 4 else (*named[:2], '...', named[-1]))}"


TracedLayers = Sequence[Repetition]


def traced_layers(recipe: TrainingRecipe) -> TracedLayers:
    """The layers to run, in forward order: of layers that repeat in a pattern, one group in the middle runs for all.

    A group repeats only if a layer of the same kind comes before it as within the pattern, and after it: what one layer
    leaves is freed by the next, and an engine gathers the weights of the next in advance. So the first and the last
    layer of a model run by themselves. Every layer does if its activations move to main memory,
    and if ZeRO gathers weights some layers in advance, or reduces gradients in a bucket that some layers fill.
    """
    tape = recipe.spec.tape
    layers = recipe.spec.layers if tape is None else len(tape.kinds)
    if recipe.activation_offload or recipe.zero:
        return [Repetition(index) for index in range(layers)]
    if tape is None:
        kinds: Sequence[object] = layer_memory_kinds(recipe)
    else:
        kinds = [(kind, recipe.checkpoints_layer(tape.numbers[index])) for index, kind in enumerate(tape.kinds)]
    traced: list[Repetition] = []
    index = 0
    while index < layers:
        traced.append(_longest_repetition(kinds, index))
        index = traced[-1].end
    return traced


def layer_of(recipe: TrainingRecipe, parameter: str) -> int | None:
    """Index of the layer that a parameter belongs to, or None; a tape knows its layers by itself."""
    tape = recipe.spec.tape
    return layer_index(parameter) if tape is None else tape.layer_of(parameter)


def _longest_repetition(kinds: Sequence[object], first: int) -> Repetition:
    """The repetition from this layer on that saves the most layers; a single layer if none repeats."""
    best, most_saved = Repetition(first), 0
    for period in range(1, (len(kinds) - first) // 2 + 1) if first else ():
        if most_saved >= len(kinds) - 1 - first - period:
            break
        # how many layers from the one before the first are of the kind of the layer a period later
        alike, later = 0, first - 1 + period
        while later < len(kinds) and kinds[later - period] == kinds[later]:
            alike, later = alike + 1, later + 1
        times = (alike - 2) // period + 1
        if (times - 1) * period > most_saved:
            best, most_saved = Repetition(first, period, times), (times - 1) * period
    return best
