"""The kernel itself, imported when a model asks for it."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        silu = functional.silu(gate)
        up_grad = grad * silu
        del silu
        gate_grad = torch.ops.aten.silu_backward(grad * up, gate)
        return gate_grad, up_grad


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return _SwiGLU.apply(gate, up)
