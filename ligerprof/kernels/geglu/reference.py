"""GeGLU in plain torch."""

from torch import Tensor
from torch.nn import functional


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Gelu(gate) * up, in the tanh form of GELU."""
    return functional.gelu(gate, approximate="tanh") * up


def geglu_linear(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The linear layer's output on geglu(gate, up)."""
    return functional.linear(geglu(gate, up), weight, bias)
