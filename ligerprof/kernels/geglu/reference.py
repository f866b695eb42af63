"""GeGLU in plain torch."""

from torch import Tensor
from torch.nn import functional


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Gelu(gate) * up, in the tanh form of GELU."""
    return functional.gelu(gate, approximate="tanh") * up
