"""A Mamba-2 mixer, with its sizes from a config."""

from dataclasses import dataclass

from ligerprof.models.config_keys import LayerChoice


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSpace:
    """Where a layer has a Mamba-2 mixer. Module names are relative to `name`.

    Attributes:
        joint: the projection of gate, values, both kinds of states and time steps.
        norm: the norm of the gated output; None: the output is gated only.
        layers: the layers that have one instead of attention; None: all layers have both, in parallel.
        adapts_out: whether peft adapts its last projection (`_check_lora_target_modules_mamba` refuses some).
        scales_parts: whether numbers multiply its input and each part of the projection.
    """

    name: str = "mamba"
    joint: str = "in_proj"
    conv: str = "conv1d"
    out: str = "out_proj"
    norm: str | None = "norm"
    layers: LayerChoice | None = None
    adapts_out: bool = True
    scales_parts: bool = False


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
