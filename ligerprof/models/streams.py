"""Several residual streams, which layers predict and correct; layers that reuse keys; and inputs of each layer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ligerprof.errors import UnknownModelError
from ligerprof.text import short_repr


@dataclass(frozen=True, kw_only=True, slots=True)
class Streams:
    """Gemma 3n's decoder: several residual streams, and inputs of each layer. Module names are those in transformers.

    Attributes:
        count: the config key of the number of streams.
        rank: that of the width between the projections of a Laurel block.
        width: that of the width of a layer's own input.
        vocabulary: that of the number of tokens that have such inputs.
        shared: that of the number of layers at the end that reuse keys and values.
        sparsities: that of a list of the share of each layer's gates that are set to zero.
        model_projection, projection_norm, embedding: what makes the inputs of the layers.
        spread, merge: lists of projections, from the embedding to each further stream, and back.
    """

    count: str = "altup_num_inputs"
    rank: str = "laurel_rank"
    width: str = "hidden_size_per_layer_input"
    vocabulary: str = "vocab_size_per_layer_input"
    shared: str = "num_kv_shared_layers"
    sparsities: str = "activation_sparsity_pattern"
    embedding: str = "model.embed_tokens_per_layer"
    model_projection: str = "model.per_layer_model_projection"
    projection_norm: str = "model.per_layer_projection_norm"
    spread: str = "model.altup_projections"
    merge: str = "model.altup_unembed_projections"


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSizes:
    """The sizes of these parts in a model.

    Attributes:
        count: number of streams.
        rank: the width between the projections of a Laurel block.
        width: the width of a layer's own input.
        vocabulary: number of tokens that have such inputs.
    """

    count: int
    rank: int
    width: int
    vocabulary: int

    def outer_parameters(self, row: Streams, hidden: int, layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the weights outside of the layers, which follow the final norm."""
        joint = layers * self.width
        yield f"{row.embedding}.weight", (self.vocabulary, joint)
        yield f"{row.model_projection}.weight", (joint, hidden)
        yield f"{row.projection_norm}.weight", (self.width,)
        for module in (row.spread, row.merge):
            for index in range(self.count - 1):
                yield f"{module}.{index}.weight", (hidden, hidden)


def reusing(shared: object, windowed: Sequence[bool], key: str) -> tuple[bool, ...]:
    """Which layers reuse keys and values: the last layers reuse those of the last others of their kind.

    Raises:
        UnknownModelError: a layer would reuse what no layer stores.
    """
    layers = len(windowed)
    if not isinstance(shared, int) or isinstance(shared, bool) or shared < 0:
        raise UnknownModelError(f"{key!r} is {short_repr(shared)}, not a number of layers. Fix the config.")
    own = windowed[: max(layers - shared, 0)]
    if set(own) != set(windowed):
        raise UnknownModelError(f"{key!r} is {shared}: some layers would reuse what no layer stores. Fix the config.")
    return tuple(index >= len(own) for index in range(layers))


def thinned(row: Streams, config: Mapping[str, Any], layers: int, most: int = 10) -> tuple[bool, ...]:
    """Whether each layer sets most of its gates to zero; by default the first ten of more than ten layers.

    Raises:
        UnknownModelError: the config's list is not one number per layer.
    """
    listed = config.get(row.sparsities)
    if listed is None:
        return tuple(layers > most and index < most for index in range(layers))
    if (
        not isinstance(listed, list)
        or len(listed) != layers
        or not all(isinstance(item, (int, float)) for item in listed)
    ):
        raise UnknownModelError(f"{row.sparsities!r} is not a list of {layers} numbers. Fix the config.")
    return tuple(item > 0 for item in listed)
