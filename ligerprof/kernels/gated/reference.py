"""The gated activations in plain torch."""

from torch import Tensor
from torch.nn import functional


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up."""
    return functional.silu(gate) * up


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute gelu(gate) * up, with GELU's tanh approximation."""
    return functional.gelu(gate, approximate="tanh") * up


def swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a linear layer to swiglu(gate, up)."""
    return functional.linear(swiglu(gate, up), weight, bias)


def geglu_linear(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a linear layer to geglu(gate, up)."""
    return functional.linear(geglu(gate, up), weight, bias)
