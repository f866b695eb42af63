"""What some layers have instead of attention: gated delta nets, with their sizes from a config, and convolutions."""

from dataclasses import dataclass

from ligerprof.models.config_keys import LayerChoice

# torch_chunk_gated_delta_rule in transformers
CHUNK_TOKENS = 64
_MOST_LAYERS = LayerChoice(chosen="linear_attention", period=4, period_key="full_attention_interval")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaNet:
    """Where a layer has a gated delta net instead of attention. Module names are relative to `name`.

    Attributes:
        inputs: the projections: one of query, key, value and gate and one of both rates, with the heads interleaved, or
            one of query, key and value, and one each of gate, write strength and decay.
        layers: the layers that have one.
    """

    name: str = "linear_attn"
    inputs: tuple[str, ...]
    conv: str = "conv1d"
    norm: str = "norm"
    out: str = "out_proj"
    layers: LayerChoice = _MOST_LAYERS

    @property
    def interleaves(self) -> bool:
        """Whether the projections interleave the heads, so that each part is copied."""
        return len(self.inputs) == 2


_CONVOLVED = LayerChoice(chosen="conv", others="full_attn_idxs")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortConv:
    """Where a layer has a gated convolution over a few tokens instead of attention.

    Attributes:
        joint: the projection of both gates and the convolution's input.
        kernel: the config key of the number of tokens that it reads.
        layers: the layers that have one.
    """

    name: str = "conv"
    joint: str = "in_proj"
    conv: str = "conv"
    out: str = "out_proj"
    kernel: str = "conv_L_cache"
    layers: LayerChoice = _CONVOLVED


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
