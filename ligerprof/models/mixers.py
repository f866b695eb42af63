"""What decoder layers have next to plain attention and MLPs: other mixers, mixtures of experts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ligerprof.models.config_keys import LayerChoice, SparseLayers


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
    shared: str | None = None
    shared_times: str | None = None
    adapted_by_name: bool = False
    optional: bool = False
    layers: SparseLayers | None = None

    def are_left_out(self, config: Mapping[str, Any]) -> bool:
        """Whether the layers have the expert that all tokens share alone, as their MLP."""
        return self.optional and config.get(self.count) == 0
