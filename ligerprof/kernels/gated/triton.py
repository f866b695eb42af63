"""Gated activations in Triton: act(gate) * up, alone or with the linear layer that follows.

Backward keeps gate and up only and recomputes the rest. Alone, gate and product may have a multiplier; None is one.

Axes: N rows, I intermediate columns, H output features of the linear layer.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from ligerprof.errors import KernelInputError
from ligerprof.kernels.device import on_device
from ligerprof.kernels.sizes import ceil_div, next_power_of_2
from ligerprof.kernels.tensors import (
    as_rows,
    check_tensors,
    columns_of,
    dense_like,
    first_order_only,
    graph_is_retained,
    is_part_of_a_leaf,
    overlaps_itself,
    row_stride,
    rows_are_disjoint,
)

# launch config: one piece of one row per program; consecutive programs take neighboring memory
_BLOCK = 1024
_WARPS = 4


@triton.jit
def _activate(gate, ACTIVATION: tl.constexpr):
    """Compute act(gate) and its derivative, in fp32."""
    if ACTIVATION == "swiglu":
        sigmoid = tl.sigmoid(gate)
        slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    elif ACTIVATION == "geglu_exact":
        # the normal distribution of the gate, and its density
        sigmoid = 0.5 + 0.5 * tl.erf(0.7071067811865476 * gate)
        slope = sigmoid + gate * (0.3989422804014327 * tl.exp(-0.5 * gate * gate))
    else:
        # 0.5 (1 + tanh(u)) = sigmoid(2u), with u = sqrt(2 / pi) (x + 0.044715 x^3)
        root, cubic = 0.7978845608028654, 0.044715
        sigmoid = tl.sigmoid(2.0 * root * (gate + cubic * gate * gate * gate))
        # the sigmoid first: it is 0 or 1 where the square times the gate would be infinite
        slope = sigmoid + sigmoid * (1.0 - sigmoid) * gate * (2.0 * root * (1.0 + 3.0 * cubic * gate * gate))
    return gate * sigmoid, slope


@triton.jit
def _gated_fwd_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    gate_stride,
    up_stride,
    columns,
    pieces,
    gate_multiplier,
    multiplier,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // pieces).to(tl.int64)
    column = (tl.program_id(0) % pieces) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    if gate_multiplier is not None:
        gate *= tl.cast(gate_multiplier, tl.float32)
    activated, _ = _activate(gate, ACTIVATION)
    if multiplier is not None:
        activated *= tl.cast(multiplier, tl.float32)
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
    gate_multiplier,
    multiplier,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradients of gate and up, and, unless `y` is None, the product again.

    Gradients may be written over gate and up, and the product over `dy`.
    """
    row = (tl.program_id(0) // pieces).to(tl.int64)
    column = (tl.program_id(0) % pieces) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    dy = tl.load(dy_ptr + row * dy_stride + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    if gate_multiplier is not None:
        gate *= tl.cast(gate_multiplier, tl.float32)
    activated, slope = _activate(gate, ACTIVATION)
    if gate_multiplier is not None:
        slope *= tl.cast(gate_multiplier, tl.float32)
    if multiplier is not None:
        activated *= tl.cast(multiplier, tl.float32)
        slope *= tl.cast(multiplier, tl.float32)
    gate_grad = (dy * up * slope).to(gate_grad_ptr.dtype.element_ty)
    up_grad = (dy * activated).to(up_grad_ptr.dtype.element_ty)
    tl.store(gate_grad_ptr + row * gate_grad_stride + column, gate_grad, mask=mask)
    tl.store(up_grad_ptr + row * up_grad_stride + column, up_grad, mask=mask)
    if y_ptr is not None:
        tl.store(y_ptr + row * dy_stride + column, (activated * up).to(y_ptr.dtype.element_ty), mask=mask)


def _block(columns: int) -> int:
    """Columns per program.

    Its arithmetic also makes torch.compile trace each width by itself. If the width were a symbol, Dynamo would take it
    from a stride of the incoming gradient in backward, which is 0 for the gradient of a sum.
    """
    return min(_BLOCK, next_power_of_2(columns))


# of the gate, and of the product; None is one
_Multipliers = tuple[float | None, float | None]
_NO_MULTIPLIERS: _Multipliers = (None, None)


def multiply_gates(gate: Tensor, up: Tensor, activation: str, multipliers: _Multipliers = _NO_MULTIPLIERS) -> Tensor:
    """Compute act(gate) * up, contiguous."""
    gate_NI, up_NI = as_rows(gate), as_rows(up)
    rows, columns = gate_NI.size(0), columns_of(gate)
    block = _block(columns)
    pieces = ceil_div(columns, block)
    y = dense_like(gate)
    with on_device(gate):
        _gated_fwd_kernel[(rows * pieces,)](
            gate_ptr=gate_NI,
            up_ptr=up_NI,
            y_ptr=y,
            gate_stride=row_stride(gate_NI, columns),
            up_stride=row_stride(up_NI, columns),
            columns=columns,
            pieces=pieces,
            gate_multiplier=multipliers[0],
            multiplier=multipliers[1],
            ACTIVATION=activation,
            BLOCK=block,
            num_warps=_WARPS,
        )
    return y


def differentiate_gates(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: str,
    multipliers: _Multipliers = _NO_MULTIPLIERS,
    *,
    with_product: bool = False,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of gate and up [N, I], and return with them `grad`, the gradient of the product.

    Args:
        with_product: write act(gate) * up over `grad`.
        overwrite: write the gradients over gate and up.
    """
    grad_NI, gate_NI, up_NI = as_rows(grad), as_rows(gate), as_rows(up)
    rows, columns = gate_NI.size(0), columns_of(gate)
    block = _block(columns)
    pieces = ceil_div(columns, block)
    gate_grad_NI, up_grad_NI = gate_NI, up_NI
    if not overwrite:
        gate_grad_NI = torch.empty((rows, columns), dtype=gate.dtype, device=gate.device)
        up_grad_NI = torch.empty((rows, columns), dtype=gate.dtype, device=gate.device)
    with on_device(gate):
        _gated_bwd_kernel[(rows * pieces,)](
            dy_ptr=grad_NI,
            gate_ptr=gate_NI,
            up_ptr=up_NI,
            gate_grad_ptr=gate_grad_NI,
            up_grad_ptr=up_grad_NI,
            y_ptr=grad_NI if with_product else None,
            dy_stride=row_stride(grad_NI, columns),
            gate_stride=row_stride(gate_NI, columns),
            up_stride=row_stride(up_NI, columns),
            gate_grad_stride=row_stride(gate_grad_NI, columns),
            up_grad_stride=row_stride(up_grad_NI, columns),
            columns=columns,
            pieces=pieces,
            gate_multiplier=multipliers[0],
            multiplier=multipliers[1],
            ACTIVATION=activation,
            BLOCK=block,
            num_warps=_WARPS,
        )
    return gate_grad_NI, up_grad_NI, grad_NI


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str, multipliers: _Multipliers) -> Tensor:
        ctx.activation, ctx.multipliers = activation, multipliers
        ctx.save_for_backward(gate, up)
        return multiply_gates(gate, up, activation, multipliers)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        gate_grad_NI, up_grad_NI, _ = differentiate_gates(grad, gate, up, ctx.activation, ctx.multipliers)
        return gate_grad_NI.view(gate.shape), up_grad_NI.view(up.shape), None, None


class _Keep(torch.autograd.Function):
    """Saves the inputs of a gated activation and a linear layer, and computes their backward; forward is `_Compute`.

    torch.utils.checkpoint stops recomputing a layer at the last tensor that is saved for backward. This function saves
    tensors and computes nothing, and `_Compute`, which runs after it, computes and saves nothing. So the recomputation
    runs neither the product nor the linear layer. A placeholder for the result connects the two in autograd's graph.
    """

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, _bias: Tensor | None, activation: str, overwrite: bool
    ) -> Tensor:
        ctx.activation, ctx.overwrite = activation, overwrite
        ctx.save_for_backward(gate, up, weight)
        # a single element expanded to the result's shape: autograd needs the shape, and the values are never read
        return gate.new_empty(1).expand(*gate.shape[:-1], weight.shape[0])

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        grad_NH = as_rows(grad)
        overwrite = ctx.overwrite and not torch.compiler.is_compiling() and not graph_is_retained()
        overwrite = overwrite and _can_be_overwritten(gate, up)
        wants_weight_grad, wants_bias_grad = ctx.needs_input_grad[2:4]
        gate_grad_NI, up_grad_NI, product_NI = differentiate_gates(
            torch.mm(grad_NH, weight), gate, up, ctx.activation, with_product=wants_weight_grad, overwrite=overwrite
        )
        if overwrite:
            # bump the version counters, so that autograd raises an error if another backward pass needs gate or up
            torch.autograd.graph.increment_version((gate, up))
        weight_grad_HI = torch.mm(grad_NH.t(), product_NI) if wants_weight_grad else None
        bias_grad_H = grad_NH.sum(0) if wants_bias_grad else None
        return gate_grad_NI.view(gate.shape), up_grad_NI.view(up.shape), weight_grad_HI, bias_grad_H, None, None


class _Compute(torch.autograd.Function):
    """The forward of `_Keep`; backward passes the gradient on to the placeholder unchanged."""

    @staticmethod
    def forward(
        _ctx: Any, _result: Tensor, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, activation: str
    ) -> Tensor:
        return functional.linear(multiply_gates(gate, up, activation), weight, bias)

    @staticmethod
    @first_order_only
    def backward(_ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, None, None, None, None


class _ComputeAndKeep(_Keep):
    """Both at once, for torch.compile: its partitioner decides what to recompute.

    `_Compute` has an input that forward does not read, and a gradient that backward passes on unchanged. No other
    function here has these, and the pair stopped under torch.compile on torch 2.11, which compiles this one.
    """

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, activation: str, overwrite: bool
    ) -> Tensor:
        ctx.activation, ctx.overwrite = activation, overwrite
        ctx.save_for_backward(gate, up, weight)
        return functional.linear(multiply_gates(gate, up, activation), weight, bias)


def gated_linear(
    gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, activation: str, *, overwrite: bool = False
) -> Tensor:
    """Compute `linear(act(gate) * up, weight, bias)` in the dtype that autocast would select.

    Args:
        gate, up: [..., I].
        weight: [H, I].
        bias: [H], or None.
        activation: `swiglu`, `geglu` (the tanh approximation) or `geglu_exact`.
        overwrite: allow backward to write gradients over gate and up. Backward does not if the graph is retained, or if
            one of them is a leaf that wants a gradient or a view of one.

    Raises:
        KernelInputError: gate and up differ in shape or dtype, or the weight does not match them.
    """
    check_gates(gate, up, activation)
    check_tensors(activation, gate, weight, bias)
    if weight.ndim != 2 or weight.shape[1] != gate.shape[-1]:
        raise KernelInputError(
            f"{activation}: a weight of shape {tuple(weight.shape)} does not match gates of {gate.shape[-1]} columns."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise KernelInputError(
            f"{activation}: a bias of shape {tuple(bias.shape)} does not match a weight of {tuple(weight.shape)}."
        )
    kind = gate.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        gate, up, weight = gate.to(dtype), up.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if torch.compiler.is_compiling():
        return _ComputeAndKeep.apply(gate, up, weight, bias, activation, overwrite)  # type: ignore[no-any-return]
    placeholder = _Keep.apply(gate, up, weight, bias, activation, overwrite)
    return _Compute.apply(placeholder, gate, up, weight, bias, activation)  # type: ignore[no-any-return]


def _gated(gate: Tensor, up: Tensor, activation: str, gate_multiplier: float, multiplier: float) -> Tensor:
    check_gates(gate, up, activation)
    multipliers = None if gate_multiplier == 1.0 else gate_multiplier, None if multiplier == 1.0 else multiplier
    return _Gated.apply(gate, up, activation, multipliers)  # type: ignore[no-any-return]


def _can_be_overwritten(gate: Tensor, up: Tensor) -> bool:
    """Whether gradients may be written over gate and up: they are not leaves', and each element has its own memory."""
    if is_part_of_a_leaf(gate) or is_part_of_a_leaf(up):
        return False
    return not overlaps_itself(gate) and not overlaps_itself(up) and rows_are_disjoint(as_rows(gate), as_rows(up))


def check_gates(gate: Tensor, up: Tensor, activation: str) -> None:
    check_tensors(activation, gate, up)
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise KernelInputError(
            f"{activation}: gate {tuple(gate.shape)} {gate.dtype} and up {tuple(up.shape)} {up.dtype} differ."
        )


def swiglu(gate: Tensor, up: Tensor, *, gate_multiplier: float = 1.0, multiplier: float = 1.0) -> Tensor:
    """Compute silu(gate_multiplier * gate) * up * multiplier, of any shape; both need the same shape and dtype.

    Raises:
        KernelInputError: gate and up differ in shape or dtype.
    """
    return _gated(gate, up, "swiglu", gate_multiplier, multiplier)


def geglu(
    gate: Tensor, up: Tensor, *, approximate: str = "tanh", gate_multiplier: float = 1.0, multiplier: float = 1.0
) -> Tensor:
    """Compute gelu(gate_multiplier * gate) * up * multiplier, as `swiglu`.

    Args:
        approximate: `tanh`: GELU's tanh approximation; `none`: the exact function. These are torch's names.

    Raises:
        KernelInputError: gate and up differ in shape or dtype, or the approximation is unknown.
    """
    return _gated(gate, up, _gelu(approximate), gate_multiplier, multiplier)


def swiglu_linear(
    gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None = None, *, overwrite: bool = False
) -> Tensor:
    """Apply a linear layer to swiglu(gate, up), which backward recomputes; see `gated_linear`."""
    return gated_linear(gate, up, weight, bias, "swiglu", overwrite=overwrite)


def geglu_linear(
    gate: Tensor,
    up: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    approximate: str = "tanh",
    overwrite: bool = False,
) -> Tensor:
    """Apply a linear layer to geglu(gate, up), which backward recomputes; see `gated_linear` and `geglu`."""
    return gated_linear(gate, up, weight, bias, _gelu(approximate), overwrite=overwrite)


def _gelu(approximate: str) -> str:
    """The activation that torch calls GELU with this approximation.

    Raises:
        KernelInputError: the approximation is unknown.
    """
    if approximate not in _GELUS:
        raise KernelInputError(f"geglu: unknown approximation {approximate!r}. Known: {', '.join(_GELUS)}.")
    return _GELUS[approximate]


_GELUS = {"tanh": "geglu", "none": "geglu_exact"}
