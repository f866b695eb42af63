"""Linear layer and cross-entropy in one: the logits of a few tokens at a time, and their gradient in the same bytes.

N tokens, D hidden, V vocabulary, C tokens of a chunk. The matrix products are cuBLAS's; the pass between them is the
row kernel of `ligerprof.kernels.ce.triton`. Both gradients are made in forward, where the logits exist.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from ligerprof.errors import KernelInputError
from ligerprof.kernels.ce.triton import (
    flat_labels,
    graph_is_kept,
    launch_cross_entropy,
    loss_divisor,
    reduce_losses,
    scale_by_device_factor,
    waits_for_loss_scale,
)
from ligerprof.kernels.flce.plan import plan_chunks
from ligerprof.kernels.options import PLAIN_LOSS, LossOptions


@dataclass(frozen=True, slots=True)
class _Operands:
    """The call's tensors, in the dtype the products are computed in."""

    hidden_ND: Tensor
    weight_VD: Tensor
    bias_V: Tensor | None
    labels_N: Tensor
    seq_len: int
    options: LossOptions


@dataclass(frozen=True, slots=True)
class _Gradients:
    """Where the gradients go; None where one is not wanted."""

    hidden_ND: Tensor | None
    weight_VD: Tensor | None
    bias_V: Tensor | None

    @property
    def wanted(self) -> bool:
        return not (self.hidden_ND is None and self.weight_VD is None and self.bias_V is None)


def _product_into(out: Tensor, left: Tensor, right: Tensor, *, accumulate: bool) -> None:
    """Write left @ right to `out`, or add it; `out` may be fp32 where the operands are not."""
    if out.dtype == left.dtype:
        if accumulate:
            torch.addmm(out, left, right, out=out)
        else:
            torch.mm(left, right, out=out)
    elif left.is_cuda or isinstance(left, FakeTensor):
        if accumulate:
            torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
        else:
            torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:
        # torch has no mixed product on the CPU
        _product_into(out, left.to(out.dtype), right.to(out.dtype), accumulate=accumulate)


def _run_chunks(op: _Operands, grads: _Gradients, loss_N: Tensor | None, scale: Tensor | None) -> None:
    """Fill the losses and the gradients, chunk by chunk; the gradients are scaled by `scale`."""
    (tokens, hidden), vocab = op.hidden_ND.shape, op.weight_VD.shape[0]
    dtype, device = op.hidden_ND.dtype, op.hidden_ND.device
    plan = plan_chunks(
        tokens=tokens, hidden=hidden, vocab=vocab, element_bytes=dtype.itemsize, budget=op.options.budget
    )
    workspace_CV = torch.empty(plan.chunk_tokens, plan.row_elements, dtype=dtype, device=device)[:, :vocab]
    ones_C = None if grads.bias_V is None else torch.ones(1, plan.chunk_tokens, dtype=dtype, device=device)
    weight_DV = op.weight_VD.t()
    for start in range(0, tokens, plan.chunk_tokens):
        stop = min(start + plan.chunk_tokens, tokens)
        hidden_CD, logits_CV = op.hidden_ND[start:stop], workspace_CV[: stop - start]
        torch.mm(hidden_CD, weight_DV, out=logits_CV)
        launch_cross_entropy(
            logits_CV,
            logits_CV if grads.wanted else None,
            op.labels_N,
            loss_N,
            scale,
            op.options,
            first_row=start,
            seq_len=op.seq_len,
            width=plan.row_elements,
            bias_V=op.bias_V,
        )
        # from here on the chunk holds the gradient of its logits
        if grads.hidden_ND is not None:
            torch.mm(logits_CV, op.weight_VD, out=grads.hidden_ND[start:stop])
        if grads.weight_VD is not None:
            _product_into(grads.weight_VD, logits_CV.t(), hidden_CD, accumulate=start > 0)
        if grads.bias_V is not None and ones_C is not None:
            _product_into(grads.bias_V.view(1, vocab), ones_C[:, : stop - start], logits_CV, accumulate=start > 0)


def _operands(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    options: LossOptions,
    *,
    dtype: torch.dtype | None = None,
) -> _Operands:
    """Flatten, and cast to `dtype`, or as autocast would have cast for a linear layer."""
    kind = hidden.device.type
    if dtype is None:
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    labels_N, seq_len = flat_labels(labels, hidden.device)
    return _Operands(
        hidden_ND=hidden.reshape(-1, hidden.shape[-1]).to(dtype),
        weight_VD=weight.to(dtype),
        bias_V=bias,
        labels_N=labels_N,
        seq_len=seq_len,
        options=options,
    )


def _empty_gradients(op: _Operands, weight: Tensor, bias: Tensor | None, wanted: tuple[bool, ...]) -> _Gradients:
    """Buffers that the first chunk writes whole, so none is filled with zeros."""
    weight_dtype = torch.float32 if op.options.accumulate_fp32 else weight.dtype
    return _Gradients(
        hidden_ND=torch.empty_like(op.hidden_ND, memory_format=torch.contiguous_format) if wanted[0] else None,
        weight_VD=torch.empty(weight.shape, dtype=weight_dtype, device=weight.device) if wanted[1] else None,
        bias_V=torch.empty_like(bias, dtype=weight_dtype) if bias is not None and wanted[2] else None,
    )


class _FusedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        num_items: Tensor | float | None,
        options: LossOptions,
        track: bool,
    ) -> Tensor:
        op = _operands(hidden, weight, bias, labels, options)
        ctx.options, ctx.compute_dtype = options, op.hidden_ND.dtype
        ctx.hidden_shape, ctx.hidden_dtype = hidden.shape, hidden.dtype
        loss_N = torch.empty(op.labels_N.numel(), dtype=torch.float32, device=hidden.device)
        if options.reduction == "none":
            _run_chunks(op, _Gradients(None, None, None), loss_N, None)
            ctx.save_for_backward(hidden, weight, bias, labels)
            return loss_N.view(labels.shape)
        factor = loss_divisor(op.labels_N, op.seq_len, num_items, options)
        total = torch.empty((), dtype=torch.float32, device=hidden.device)
        grads = _empty_gradients(op, weight, bias, tuple(track and needed for needed in ctx.needs_input_grad[:3]))
        _run_chunks(op, grads, loss_N, None if waits_for_loss_scale(ctx.compute_dtype) else factor)
        reduce_losses(loss_N, factor, total)
        ctx.save_for_backward(grads.hidden_ND, _as(grads.weight_VD, weight), _as(grads.bias_V, bias), factor)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.options.reduction == "none":
            grads = _recomputed_gradients(ctx, grad_loss)
        else:
            grads = _scaled_gradients(ctx, grad_loss)
        grad_hidden = grads.hidden_ND
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(ctx.hidden_dtype).view(ctx.hidden_shape)
        return grad_hidden, grads.weight_VD, grads.bias_V, None, None, None, None


def _as(value: Tensor | None, like: Tensor | None) -> Tensor | None:
    return value if value is None or like is None else value.to(like.dtype)


def _scaled_gradients(ctx: Any, grad_loss: Tensor) -> _Gradients:
    *made, factor = ctx.saved_tensors
    late = factor if waits_for_loss_scale(ctx.compute_dtype) else None
    in_place = not graph_is_kept()
    return _Gradients(
        *(None if g is None else scale_by_device_factor(g, grad_loss, late, in_place=in_place) for g in made)
    )


def _recomputed_gradients(ctx: Any, grad_loss: Tensor) -> _Gradients:
    """Gradients where every token has its own factor: it must be known before tokens are summed."""
    hidden, weight, bias, labels = ctx.saved_tensors
    op = _operands(hidden, weight, bias, labels, ctx.options, dtype=ctx.compute_dtype)
    grads = _empty_gradients(op, weight, bias, ctx.needs_input_grad[:3])
    _run_chunks(op, grads, None, grad_loss.reshape(-1).contiguous())
    return _Gradients(grads.hidden_ND, _as(grads.weight_VD, weight), _as(grads.bias_V, bias))


def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    options: LossOptions = PLAIN_LOSS,
    bias: Tensor | None = None,
    num_items: Tensor | float | None = None,
) -> Tensor:
    """Cross-entropy of `hidden @ weight.T + bias` against labels, in fp32, the logits never whole.

    Under autocast the products run in its dtype, and the weight's gradient is summed in the weight's own.
    Where no label counts, the loss and its gradients are zero (torch's mean is NaN there).

    Args:
        hidden: [..., D].
        weight: [V, D].
        labels: [...], of the hidden states' leading shape.
        num_items: what the summed loss is divided by instead of the count, where the reduction is `mean`;
            a tensor stays on its device.

    Raises:
        KernelInputError: shapes that do not go together.
    """
    if labels.shape != hidden.shape[:-1] or hidden.shape[-1] != weight.shape[-1]:
        raise KernelInputError(
            f"flce: hidden states {tuple(hidden.shape)}, a head of {tuple(weight.shape)} and labels"
            f" {tuple(labels.shape)} do not go together. Labels need the hidden states' leading shape."
        )
    tensors = (hidden, weight) if bias is None else (hidden, weight, bias)
    track = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return _FusedLinearCrossEntropy.apply(  # type: ignore[no-any-return]
        hidden, weight, bias, labels, num_items, options, track
    )
