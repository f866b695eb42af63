"""SwiGLU in plain torch."""

from torch import Tensor
from torch.nn import functional


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Silu(gate) * up."""
    return functional.silu(gate) * up


def swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The linear layer's output on swiglu(gate, up)."""
    return functional.linear(swiglu(gate, up), weight, bias)
