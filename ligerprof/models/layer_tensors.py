"""Describe the parameters of a decoder layer by their widths: linear layers, norms, and single tensors."""

from dataclasses import dataclass
from typing import Literal

# heads: their number; query: heads x head_dim; key: key-value heads x head_dim; experts: their number; expert: the
# intermediate size of one;
# shared: that of the expert that all tokens go through
# delta key, value, heads, head: key, value, value heads and one head's value of a gated delta net; kernel: tokens that
# its convolution reads
# ssm inner, heads, states: value, heads, and inputs of all states of a Mamba-2 mixer
# streams, stream pairs: their number, and its square; laurel: the width of a Laurel block; layer input: that of a layer
# the others are sizes of latent attention
Width = Literal[
    "latent query",
    "direct query",
    "query rank",
    "key rank",
    "key rank rotated",
    "key and value",
    "attended",
    "hidden",
    "intermediate",
    "query",
    "key",
    "head",
    "heads",
    "experts",
    "expert",
    "shared",
    "one",
    "delta key",
    "delta value",
    "delta heads",
    "delta head",
    "kernel",
    "ssm inner",
    "ssm heads",
    "ssm states",
    "streams",
    "stream pairs",
    "laurel",
    "layer input",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """A linear layer of a decoder layer; its dotted name is relative to the decoder layer.

    Attributes:
        outputs: the output's width; several widths are projections joined in one matrix.
        bias: whether it has a bias, or the config key that decides (absent means no bias).
        transposed: whether the weight is stored as (in, out), as in transformers' Conv1D.
        sparse: whether only layers with experts have it (True), or only layers without (False).
        fp32: whether it is in fp32, whatever the model's dtype.
        recurrent: whether only layers without attention have it (True), or only layers with attention (False).
        of_keys: whether layers that reuse the keys and values of another one lack it.
    """

    name: str
    inputs: Width
    outputs: tuple[Width, ...]
    bias: bool | str = False
    transposed: bool = False
    sparse: bool | None = None
    fp32: bool = False
    recurrent: bool | None = None
    of_keys: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RawWeight:
    """A parameter of a module that is neither a linear layer nor a norm.

    Attributes:
        name: the module, relative to the decoder layer.
        parameter: the parameter's name in the module.
        shape: the sizes of its dimensions, each a sum of widths.
        when: the config key that turns it on; None if it is always there.
        sparse: whether only layers with experts have it.
        fp32: whether it is in fp32, whatever the model's dtype.
        trained: whether it is trained.
        recurrent: as of a linear layer.
        activation: the activation function whose parameter it is, or None.
    """

    name: str
    parameter: str
    shape: tuple[tuple[Width, ...], ...]
    when: str | None = None
    sparse: bool | None = None
    fp32: bool = False
    trained: bool = True
    recurrent: bool | None = None
    activation: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NormWeight:
    """The weight of a norm in a decoder layer; LayerNorms have a bias as well.

    Attributes:
        when: the config key that turns the norm on; None if it is always there.
        unless: the config key that turns it off.
        by_head: whether the weight is a matrix with a row per head.
        recurrent, of_keys: as of a linear layer.
    """

    name: str
    width: Width = "hidden"
    when: str | None = None
    unless: str | None = None
    by_head: bool = False
    recurrent: bool | None = None
    of_keys: bool = False
