"""SwiGLU in plain torch."""

from torch import Tensor
from torch.nn import functional


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Silu(gate) * up."""
    return functional.silu(gate) * up
