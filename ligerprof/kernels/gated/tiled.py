"""A whole gated MLP some tokens at a time: no gate, up or product of a long sequence exists at once.

Backward computes a tile's gate and up again, as gradient checkpointing does for all tokens, and not what the last
layer returns.

Axes: N tokens, H hidden, I intermediate, C tokens of one tile.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ligerprof.errors import KernelInputError
from ligerprof.kernels.gated.triton import differentiate_gates, multiply_gates
from ligerprof.kernels.linear_cross_entropy.chunks import product_into
from ligerprof.kernels.sizes import ceil_div, slices_of
from ligerprof.kernels.tensors import as_rows, check_tensors, first_order_only, product_dtype

# of a tile: products over so many tokens keep an H200 busy
TILE_TOKENS = 8192


def _tiles(tokens: int, most: int) -> Iterator[slice]:
    """Tiles of about one size."""
    return slices_of(0, tokens, ceil_div(tokens, ceil_div(tokens, most)) if tokens else 1)


def _cast(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """The rows of x, and the weights, in the dtype that autocast selects for linear layers."""
    dtype = product_dtype(x)
    return as_rows(x).to(dtype), *(weight.to(dtype) for weight in weights)


class _Keep(torch.autograd.Function):
    """Saves the inputs and computes backward; forward is `_Compute`. See `triton._Keep` for why they are two."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, activation: str, tile_tokens: int
    ) -> Tensor:
        ctx.activation, ctx.tile_tokens, ctx.dtype = activation, tile_tokens, _cast(x[:0])[0].dtype
        ctx.save_for_backward(x, gate_IH, up_IH, down_HI)
        return x.new_empty(1, dtype=ctx.dtype).expand(*x.shape[:-1], down_HI.shape[0])

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        x_NH, grad_NH = as_rows(x).to(ctx.dtype), as_rows(grad)
        gate_IH, up_IH, down_HI = (weight.to(ctx.dtype) for weight in weights)
        wants_x, *wants = ctx.needs_input_grad[:4]
        x_grad_NH = torch.empty(x_NH.shape, dtype=ctx.dtype, device=x.device) if wants_x else None
        sums = [torch.empty_like(weight) if want else None for weight, want in zip(weights, wants, strict=True)]
        if len(x_NH) == 0:
            sums = [None if total is None else total.zero_() for total in sums]
        for tile in _tiles(len(x_NH), ctx.tile_tokens):
            x_CH, grad_CH = x_NH[tile], grad_NH[tile]
            gate_grad_CI, up_grad_CI, product_CI = differentiate_gates(
                torch.mm(grad_CH, down_HI),
                torch.mm(x_CH, gate_IH.t()),
                torch.mm(x_CH, up_IH.t()),
                ctx.activation,
                with_product=True,
                overwrite=True,
            )
            pairs = ((gate_grad_CI, x_CH), (up_grad_CI, x_CH), (grad_CH, product_CI))
            for total, (left, right) in zip(sums, pairs, strict=True):
                if total is not None:
                    product_into(total, left.t(), right, accumulate=tile.start > 0)
            if x_grad_NH is not None:
                torch.mm(gate_grad_CI, gate_IH, out=x_grad_NH[tile])
                x_grad_NH[tile].addmm_(up_grad_CI, up_IH)
            # before the next tile allocates its own
            del gate_grad_CI, up_grad_CI, product_CI, pairs, left, right
        x_grad = None if x_grad_NH is None else x_grad_NH.view(x.shape).to(x.dtype)
        return x_grad, *sums, None, None


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(
        _ctx: Any,
        result: Tensor,
        x: Tensor,
        gate_IH: Tensor,
        up_IH: Tensor,
        down_HI: Tensor,
        activation: str,
        tile_tokens: int,
    ) -> Tensor:
        x_NH, gate_IH, up_IH, down_HI = _cast(x, gate_IH, up_IH, down_HI)
        out_NH = torch.empty(len(x_NH), down_HI.shape[0], dtype=x_NH.dtype, device=x.device)
        for tile in _tiles(len(x_NH), tile_tokens):
            x_CH = x_NH[tile]
            product_CI = multiply_gates(torch.mm(x_CH, gate_IH.t()), torch.mm(x_CH, up_IH.t()), activation)
            torch.mm(product_CI, down_HI.t(), out=out_NH[tile])
        return out_NH.view(result.shape)

    @staticmethod
    @first_order_only
    def backward(_ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *(None,) * 6


def tiled_gated_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    activation: str = "swiglu",
    *,
    tile_tokens: int = TILE_TOKENS,
) -> Tensor:
    """Compute `linear(act(linear(x, gate_weight)) * linear(x, up_weight), down_weight)` a tile of tokens at a time.

    The weights' gradients are summed over tiles in the weights' dtype.

    Args:
        x: [..., H].
        gate_weight, up_weight: [I, H].
        down_weight: [H, I].
        activation: `swiglu`, `geglu` (the tanh approximation) or `geglu_exact`.
        tile_tokens: tokens of a tile, at most.

    Raises:
        KernelInputError: the shapes do not match, or tiles have no tokens.
    """
    check_tensors("tiled MLP", x, gate_weight, up_weight, down_weight)
    inner = (gate_weight.shape[0], x.shape[-1])
    if gate_weight.ndim != 2 or gate_weight.shape != inner or up_weight.shape != inner:
        raise KernelInputError(
            f"tiled MLP: weights {tuple(gate_weight.shape)} and {tuple(up_weight.shape)} do not match inputs of"
            f" {x.shape[-1]} columns. Give [I, {x.shape[-1]}] for gate and up."
        )
    if down_weight.ndim != 2 or down_weight.shape[1] != inner[0] or tile_tokens < 1:
        raise KernelInputError(
            f"tiled MLP: a last weight of shape {tuple(down_weight.shape)} and tiles of {tile_tokens} tokens. Give"
            f" [H, {inner[0]}], and at least one token."
        )
    weights = (gate_weight, up_weight, down_weight)
    placeholder = _Keep.apply(x, *weights, activation, tile_tokens)  # type: ignore[no-untyped-call]
    result: Tensor = _Compute.apply(placeholder, x, *weights, activation, tile_tokens)  # type: ignore[no-untyped-call]
    return result
