"""SwiGLU in Triton: silu(gate) * up, fp32 math; gate and up are all that is kept.

N rows, I intermediate columns.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ligerprof.kernels.gated.triton import check_shapes, launch_backward, launch_forward


@triton.jit
def _swiglu_fwd_kernel(gate_ptr, up_ptr, y_ptr, gate_stride, up_stride, columns, pieces, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // pieces).to(tl.int64)
    column = (tl.program_id(0) % pieces) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_bwd_kernel(
    dy_ptr,
    gate_ptr,
    up_ptr,
    gate_grad_ptr,
    up_grad_ptr,
    dy_stride,
    gate_stride,
    up_stride,
    columns,
    pieces,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // pieces).to(tl.int64)
    column = (tl.program_id(0) % pieces) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    dy = tl.load(dy_ptr + row * dy_stride + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    up_grad = dy * gate * sigmoid
    gate_grad = dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    out = row * columns + column
    tl.store(gate_grad_ptr + out, gate_grad.to(gate_grad_ptr.dtype.element_ty), mask=mask)
    tl.store(up_grad_ptr + out, up_grad.to(up_grad_ptr.dtype.element_ty), mask=mask)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return launch_forward(_swiglu_fwd_kernel, gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return launch_backward(_swiglu_bwd_kernel, grad, *ctx.saved_tensors)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Silu(gate) * up, of any shape.

    Raises:
        KernelInputError: gate and up differ in shape or dtype.
    """
    check_shapes("swiglu", gate, up)
    return _SwiGLU.apply(gate, up)  # type: ignore[no-any-return]
