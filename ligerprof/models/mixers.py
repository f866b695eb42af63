"""What decoder layers have next to plain attention and MLPs: other mixers, residual streams, mixtures of experts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ligerprof.errors import UnknownModelError
from ligerprof.models.config_keys import LayerChoice, SparseLayers
from ligerprof.text import short_repr


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentSizes:
    """Ranks of the latents, and elements per head.

    Attributes:
        query_rank: of the query's latent; 0 if the query has none.
        key_rank: of the latent of key and value.
        plain_dim, rotated_dim: elements of query and key that are not rotated, and that are.
        value_dim: elements of the value.
    """

    query_rank: int
    key_rank: int
    plain_dim: int
    rotated_dim: int
    value_dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixer:
    """What layers have instead of attention, or in parallel with it.

    Attributes:
        kind: a gated delta net, a gated convolution over a few tokens, or a Mamba-2 mixer of states.
        layers: the layers that have one instead of attention; None: all layers have both, in parallel.
        adapts_out: whether peft adapts its last projection (`_check_lora_target_modules_mamba` refuses some).
    """

    kind: Literal["delta", "convolution", "states"]
    layers: LayerChoice | None = None
    adapts_out: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSpaceSizes:
    """Heads, and elements per head and per state.

    Attributes:
        groups: groups of heads that share the states' inputs and outputs.
        kernel: tokens that the convolution before it reads.
        chunk: tokens that are multiplied with each other.
    """

    heads: int
    head_dim: int
    state: int
    groups: int
    kernel: int
    chunk: int

    @property
    def inner(self) -> int:
        """Elements of the value of one token."""
        return self.heads * self.head_dim

    @property
    def states(self) -> int:
        """Elements of one of the two projections to and from states of one token."""
        return self.groups * self.state

    @property
    def convolved(self) -> int:
        """Elements of one token that the convolution mixes."""
        return self.inner + 2 * self.states


# torch_chunk_gated_delta_rule in transformers
CHUNK_TOKENS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaSizes:
    """Heads and elements per head.

    Attributes:
        key_heads, value_heads: each key head serves `value_heads // key_heads` value heads.
        kernel: tokens that the convolution before it reads.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def keys(self) -> int:
        """Elements of the key of one token."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Elements of the value of one token."""
        return self.value_heads * self.value_dim

    @property
    def repeats(self) -> int:
        """How many value heads read one key head."""
        return self.value_heads // self.key_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSizes:
    """Gemma 3n's decoder: several residual streams, and inputs of each layer.

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

    def outer_parameters(self, hidden: int, layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the weights outside of the layers, which follow the final norm."""
        joint = layers * self.width
        yield "model.embed_tokens_per_layer.weight", (self.vocabulary, joint)
        yield "model.per_layer_model_projection.weight", (joint, hidden)
        yield "model.per_layer_projection_norm.weight", (self.width,)
        # from the embedding to each further stream, and back
        for module in ("altup_projections", "altup_unembed_projections"):
            for index in range(self.count - 1):
                yield f"model.{module}.{index}.weight", (hidden, hidden)


# of Gemma 3n: the number of layers at the end that reuse keys and values
SHARED_KEYS = "num_kv_shared_layers"


def reusing(shared: object, windowed: Sequence[bool]) -> tuple[bool, ...]:
    """Which layers reuse keys and values: the last layers reuse those of the last others of their kind.

    Raises:
        UnknownModelError: a layer would reuse what no layer stores.
    """
    key, layers = SHARED_KEYS, len(windowed)
    if not isinstance(shared, int) or isinstance(shared, bool) or shared < 0:
        raise UnknownModelError(f"{key!r} is {short_repr(shared)}, not a number of layers. Fix the config.")
    own = windowed[: max(layers - shared, 0)]
    if set(own) != set(windowed):
        raise UnknownModelError(f"{key!r} is {shared}: some layers would reuse what no layer stores. Fix the config.")
    return tuple(index >= len(own) for index in range(layers))


def thinned(config: Mapping[str, Any], layers: int, most: int = 10) -> tuple[bool, ...]:
    """Whether each layer sets most of its gates to zero; by default the first ten of more than ten layers.

    Raises:
        UnknownModelError: the config's list is not one number per layer.
    """
    listed = config.get(key := "activation_sparsity_pattern")
    if listed is None:
        return tuple(layers > most and index < most for index in range(layers))
    if (
        not isinstance(listed, list)
        or len(listed) != layers
        or not all(isinstance(item, (int, float)) for item in listed)
    ):
        raise UnknownModelError(f"{key!r} is not a list of {layers} numbers. Fix the config.")
    return tuple(item > 0 for item in listed)


# the config key of the balancing loss of the routers
BALANCING_LOSS = "output_router_logits"
# transformers' implementations of experts that the estimate follows; None: the default, grouped_mm
COVERED = (None, "grouped_mm", "eager")


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """A mixture of experts in place of an MLP, with the weights of all experts in one parameter each.

    Attributes:
        count: the config key of the number of experts.
        chosen: the config key of the number of experts per token, or the number that the code draws whatever the key.
        width: the config key of an expert's intermediate size.
        switches: config keys, with their defaults, that decide how the router scores; a text is on where the config
            has it.
        noise: the config key of the amplitude of random factors that training multiplies the input by, in place.
        multiplies_all: whether every expert multiplies all tokens, whatever the routing.
        clamped: whether gate and up lie interleaved in the experts' weights and are clamped, and the weights are stored
            as (in, out) with biases.
        shared: the config key of the intermediate size of a gated MLP that every token goes through (0: the layers have
            none), or None.
        shared_times: the config key of a number that multiplies this size (0: the layers have none), or None.
        adapted_by_name: whether peft adapts the experts' parameters where an MLP's layers are named, and leaves the
            linear layers of these names alone.
        optional: whether a config may have 0 experts.
        layers: the layers that have experts, while others have an MLP; None: all of them.
    """

    count: str = "num_experts"
    chosen: str | int = "num_experts_per_tok"
    width: str = "intermediate_size"
    switches: Mapping[str, bool | str] = field(default_factory=lambda: {"norm_topk_prob": False})
    noise: str | None = None
    multiplies_all: bool = False
    clamped: bool = False
    shared: str | None = None
    shared_times: str | None = None
    adapted_by_name: bool = False
    optional: bool = False
    layers: SparseLayers | None = None

    def are_left_out(self, config: Mapping[str, Any]) -> bool:
        """Whether the layers have the expert that all tokens share alone, as their MLP."""
        return self.optional and config.get(self.count) == 0
