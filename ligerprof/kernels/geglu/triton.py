"""GeGLU in Triton: gelu(gate) * up in the tanh form, fp32 math; gate and up are all that is kept.

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

# sqrt(2 / pi), and the cubic term of the tanh form of GELU
_SLOPE = tl.constexpr(0.7978845608028654)
_CUBIC = tl.constexpr(0.044715)


@triton.jit
def _geglu_fwd_kernel(gate_ptr, up_ptr, y_ptr, gate_stride, up_stride, columns, pieces, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // pieces).to(tl.int64)
    column = (tl.program_id(0) % pieces) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    # 0.5 (1 + tanh(u)) = sigmoid(2u)
    u = _SLOPE * (gate + _CUBIC * gate * gate * gate)
    y = gate * tl.sigmoid(2.0 * u) * up
    tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _geglu_bwd_kernel(
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
    u = _SLOPE * (gate + _CUBIC * gate * gate * gate)
    slope = _SLOPE * (1.0 + 3.0 * _CUBIC * gate * gate)
    sigmoid = tl.sigmoid(2.0 * u)
    up_grad = dy * gate * sigmoid
    gate_grad = dy * up * sigmoid * (1.0 + 2.0 * gate * (1.0 - sigmoid) * slope)
    out = row * columns + column
    tl.store(gate_grad_ptr + out, gate_grad.to(gate_grad_ptr.dtype.element_ty), mask=mask)
    tl.store(up_grad_ptr + out, up_grad.to(up_grad_ptr.dtype.element_ty), mask=mask)


class _GeGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return launch_forward(_geglu_fwd_kernel, gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return launch_backward(_geglu_bwd_kernel, grad, *ctx.saved_tensors)


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up in the tanh form, of any shape.

    Raises:
        KernelInputError: gate and up differ in shape or dtype.
    """
    check_shapes("geglu", gate, up)
    return _GeGLU.apply(gate, up)  # type: ignore[no-any-return]
