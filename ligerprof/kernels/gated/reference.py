"""The gated activations in plain torch."""

from torch import Tensor
from torch.nn import functional


def swiglu(gate: Tensor, up: Tensor, *, gate_multiplier: float = 1.0, multiplier: float = 1.0) -> Tensor:
    """Compute silu(gate_multiplier * gate) * up * multiplier."""
    return _scaled(functional.silu(_scaled(gate, gate_multiplier)) * up, multiplier)


def geglu(
    gate: Tensor, up: Tensor, *, approximate: str = "tanh", gate_multiplier: float = 1.0, multiplier: float = 1.0
) -> Tensor:
    """Compute gelu(gate_multiplier * gate) * up * multiplier, with GELU's tanh approximation unless it is `none`."""
    return _scaled(functional.gelu(_scaled(gate, gate_multiplier), approximate=approximate) * up, multiplier)


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


def swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a linear layer to swiglu(gate, up)."""
    return functional.linear(swiglu(gate, up), weight, bias)


def geglu_linear(
    gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None = None, *, approximate: str = "tanh"
) -> Tensor:
    """Apply a linear layer to geglu(gate, up)."""
    return functional.linear(geglu(gate, up, approximate=approximate), weight, bias)
