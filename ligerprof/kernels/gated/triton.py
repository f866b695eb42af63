"""Gated activations in Triton, act(gate) * up, alone or with the linear layer behind: gate and up are all that is kept.

N rows, I intermediate columns, H features behind the linear layer.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ligerprof.errors import KernelInputError
from ligerprof.kernels.device import on_device
from ligerprof.kernels.tensors import as_rows, graph_is_retained

# launch: a piece of one row a program, whatever the row's width, and neighbours in memory one after the other
_BLOCK = 1024
_WARPS = 4


@triton.jit
def _activate(gate, ACTIVATION: tl.constexpr):
    """act(gate) and its derivative, in fp32."""
    if ACTIVATION == "swiglu":
        sigmoid = tl.sigmoid(gate)
        bend = gate * (1.0 - sigmoid)
    else:
        # 0.5 (1 + tanh(u)) = sigmoid(2u), with u = sqrt(2 / pi) (x + 0.044715 x^3)
        root, cubic = 0.7978845608028654, 0.044715
        sigmoid = tl.sigmoid(2.0 * root * (gate + cubic * gate * gate * gate))
        bend = gate * (1.0 - sigmoid) * 2.0 * root * (1.0 + 3.0 * cubic * gate * gate)
    return gate * sigmoid, sigmoid * (1.0 + bend)


@triton.jit
def _gated_fwd_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    gate_stride,
    up_stride,
    columns,
    pieces,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // pieces).to(tl.int64)
    column = (tl.program_id(0) % pieces) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    activated, _ = _activate(gate, ACTIVATION)
    tl.store(y_ptr + row * columns + column, (activated * up).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gated_bwd_kernel(
    dy_ptr,
    gate_ptr,
    up_ptr,
    gate_grad_ptr,
    up_grad_ptr,
    y_ptr,
    dy_stride,
    gate_stride,
    up_stride,
    gate_grad_stride,
    up_grad_stride,
    columns,
    pieces,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Both gradients, and the product again where `y` is asked for; each may lie where its input does."""
    row = (tl.program_id(0) // pieces).to(tl.int64)
    column = (tl.program_id(0) % pieces) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    dy = tl.load(dy_ptr + row * dy_stride + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    activated, slope = _activate(gate, ACTIVATION)
    gate_grad = (dy * up * slope).to(gate_grad_ptr.dtype.element_ty)
    up_grad = (dy * activated).to(up_grad_ptr.dtype.element_ty)
    tl.store(gate_grad_ptr + row * gate_grad_stride + column, gate_grad, mask=mask)
    tl.store(up_grad_ptr + row * up_grad_stride + column, up_grad, mask=mask)
    if y_ptr is not None:
        tl.store(y_ptr + row * dy_stride + column, (activated * up).to(y_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gradients:
    """What one backward launch leaves, all [N, I].

    Attributes:
        product: act(gate) * up in the place of the gradient that backward was given, None where it was not asked for.
    """

    gate: Tensor
    up: Tensor
    product: Tensor | None


def _multiply_gates(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) * up, contiguous; nothing is kept."""
    gate_NI, up_NI = as_rows(gate), as_rows(up)
    rows, columns = gate_NI.shape
    pieces = triton.cdiv(columns, _BLOCK)
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    with on_device(gate):
        _gated_fwd_kernel[(rows * pieces,)](
            gate_NI,
            up_NI,
            y,
            gate_NI.stride(0),
            up_NI.stride(0),
            columns,
            pieces,
            ACTIVATION=activation,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
    return y


def _differentiate_gates(
    grad: Tensor, gate: Tensor, up: Tensor, activation: str, *, with_product: bool = False, overwrite: bool = False
) -> _Gradients:
    """Gradients of gate and up.

    Args:
        grad: the product's gradient; with `with_product` the product is written over it.
        overwrite: write the gradients over gate and up.
    """
    grad_NI, gate_NI, up_NI = as_rows(grad), as_rows(gate), as_rows(up)
    rows, columns = gate_NI.shape
    pieces = triton.cdiv(columns, _BLOCK)
    gate_grad, up_grad = gate_NI, up_NI
    if not overwrite:
        gate_grad, up_grad = (torch.empty((rows, columns), dtype=gate.dtype, device=gate.device) for _ in range(2))
    with on_device(gate):
        _gated_bwd_kernel[(rows * pieces,)](
            grad_NI,
            gate_NI,
            up_NI,
            gate_grad,
            up_grad,
            grad_NI if with_product else None,
            grad_NI.stride(0),
            gate_NI.stride(0),
            up_NI.stride(0),
            gate_grad.stride(0),
            up_grad.stride(0),
            columns,
            pieces,
            ACTIVATION=activation,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
    return _Gradients(gate=gate_grad, up=up_grad, product=grad_NI if with_product else None)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        ctx.activation = activation
        ctx.save_for_backward(gate, up)
        return _multiply_gates(gate, up, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        gradients = _differentiate_gates(grad, gate, up, ctx.activation)
        return gradients.gate.view(gate.shape), gradients.up.view(up.shape), None


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) * up, of any shape.

    Args:
        activation: `swiglu` or `geglu`.

    Raises:
        KernelInputError: gate and up differ in shape or dtype.
    """
    _check_gates(gate, up, activation)
    return _Gated.apply(gate, up, activation)  # type: ignore[no-any-return]


class _Keep(torch.autograd.Function):
    """Keeps what the backward of a gated activation and a linear layer needs, and is that backward.

    torch.utils.checkpoint ends a layer's recomputation at the last tensor that is kept. So this one computes nothing
    and hands on a stand-in for the result, and `_Compute`, which comes after it, keeps nothing: the recomputation runs
    neither the product nor the linear layer.
    """

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, activation: str, overwrite: bool
    ) -> Tensor:
        ctx.activation, ctx.overwrite, ctx.has_bias = activation, overwrite, bias is not None
        ctx.save_for_backward(gate, up, weight)
        # one element under every index: autograd wants the shape of the result's gradient, nobody reads the values
        return gate.new_empty(1).expand(*gate.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        grad_NH = as_rows(grad)
        overwrite = ctx.overwrite and not torch.compiler.is_compiling() and not graph_is_retained()
        wants_weight_grad, wants_bias_grad = ctx.needs_input_grad[2:4]
        gradients = _differentiate_gates(
            torch.mm(grad_NH, weight), gate, up, ctx.activation, with_product=wants_weight_grad, overwrite=overwrite
        )
        if overwrite:
            # whoever else keeps them for a backward pass is told instead of reading gradients
            torch.autograd.graph.increment_version((gate, up))
        weight_grad = None if gradients.product is None else torch.mm(grad_NH.t(), gradients.product)
        bias_grad = grad_NH.sum(0) if wants_bias_grad else None
        return gradients.gate.view(gate.shape), gradients.up.view(up.shape), weight_grad, bias_grad, None, None


class _Compute(torch.autograd.Function):
    """The forward that belongs to `_Keep`; its gradient goes to the stand-in as it is."""

    @staticmethod
    def forward(
        _ctx: Any,
        _stand_in: Tensor,
        gate: Tensor,
        up: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str,
    ) -> Tensor:
        return functional.linear(_multiply_gates(gate, up, activation), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(_ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, None, None, None, None


def gated_linear(
    gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, activation: str, *, overwrite: bool = False
) -> Tensor:
    """`linear(act(gate) * up, weight, bias)`, in the dtype that autocast would compute it in.

    Args:
        gate: [..., I].
        up: the same.
        weight: [H, I].
        overwrite: whether backward may write gradients over gate and up, as it may where nobody else reads them
            after this call. It does not where the graph is retained.

    Raises:
        KernelInputError: gate and up differ, or the weight does not go with them.
    """
    _check_gates(gate, up, activation)
    if weight.ndim != 2 or weight.shape[1] != gate.shape[-1]:
        raise KernelInputError(
            f"{activation}: a weight of {tuple(weight.shape)} does not go with gates of {gate.shape[-1]}."
        )
    kind = gate.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        gate, up, weight = gate.to(dtype), up.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    stand_in = _Keep.apply(gate, up, weight, bias, activation, overwrite)
    return _Compute.apply(stand_in, gate, up, weight, bias, activation)  # type: ignore[no-any-return]


def _check_gates(gate: Tensor, up: Tensor, activation: str) -> None:
    """Refuse inputs that are not two of a kind.

    Raises:
        KernelInputError: shapes or dtypes that differ.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise KernelInputError(
            f"{activation}: gate {tuple(gate.shape)} {gate.dtype} and up {tuple(up.shape)} {up.dtype} must be alike."
        )
