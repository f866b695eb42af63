"""Losses that forward differentiates chunk by chunk: three products of the head, and never the logits of all tokens.

Axes: N tokens, D hidden, V vocabulary, C tokens of one chunk. A chunk is a list of slices of tokens, so that the two
halves of a pair can be in one.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ligerprof.kernels.linear_cross_entropy.chunks import Gradients, Inputs, Operands, add_products, finished, prepared
from ligerprof.kernels.linear_cross_entropy.plan import aligned
from ligerprof.kernels.linear_cross_entropy.triton import scaled_gradients
from ligerprof.kernels.options import LossRequest
from ligerprof.kernels.tensors import first_order_only

Chunk = tuple[slice, ...]
# overwrites the logits [C, V] of a chunk with their gradient; the third argument is a bias that they lack, or None.
# Rows are padded to a stride that may be read and written
Differentiate = Callable[[Tensor, Chunk, Tensor | None], None]


def rows_of(value: Tensor, chunk: Chunk) -> Tensor:
    """The rows of a chunk; a view if they follow each other."""
    return value[chunk[0]] if len(chunk) == 1 else torch.cat([value[part] for part in chunk])


class ChunkedLoss(torch.autograd.Function):
    """The loss of `finish()` after each chunk's logits were differentiated, with the gradients of a head's inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        thin: Tensor | None,
        wide: Tensor | None,
        dtype: torch.dtype,
        request: LossRequest,
        chunks: Sequence[Chunk],
        differentiate: Differentiate,
        finish: Callable[[], Tensor],
    ) -> Tensor:
        inputs: Inputs = (hidden, weight, bias, thin, wide)
        op, grads, _ = prepared(inputs, dtype, request, ctx.needs_input_grad[:5])
        _run(op, grads, chunks, differentiate)
        grads = finished(grads, inputs, request)
        ctx.per_token = [None if value is None else (value.shape, value.dtype) for value in (hidden, thin)]
        made = (grads.hidden_ND, grads.weight_VD, grads.bias_V, grads.thin_NR, grads.wide_VR)
        ctx.save_for_backward(*made, None)
        return finish()

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grads = scaled_gradients(ctx, grad_loss)
        grad_hidden, grad_thin = (
            grad if grad is None else grad.to(like[1]).view(like[0])
            for grad, like in zip((grads.hidden_ND, grads.thin_NR), ctx.per_token, strict=True)
        )
        return grad_hidden, grads.weight_VD, grads.bias_V, grad_thin, grads.wide_VR, *(None,) * 5


def _run(op: Operands, grads: Gradients, chunks: Sequence[Chunk], differentiate: Differentiate) -> None:
    vocab = op.weight_VD.shape[0]
    row_elements, bias_V = aligned(vocab), None if op.bias_in_product else op.bias_V
    sizes = [sum(part.stop - part.start for part in chunk) for chunk in chunks]
    workspace = torch.empty(max(sizes), row_elements, dtype=op.logits_dtype, device=op.hidden_ND.device)
    # not every row function writes the padding, and products on a CPU may multiply it by zeros
    workspace[:, vocab:].zero_()
    for number, (chunk, size) in enumerate(zip(chunks, sizes, strict=True)):
        rows, logits_CV = slice(0, size), workspace[:size, :vocab]
        op_C = dataclasses.replace(
            op,
            hidden_ND=rows_of(op.hidden_ND, chunk),
            thin_NR=None if op.thin_NR is None else rows_of(op.thin_NR, chunk),
        )
        grads_C = dataclasses.replace(
            grads,
            hidden_ND=None if grads.hidden_ND is None else rows_of(grads.hidden_ND, chunk),
            thin_NR=None if grads.thin_NR is None else rows_of(grads.thin_NR, chunk),
        )
        op_C.write_logits(rows, slice(0, vocab), logits_CV)
        differentiate(logits_CV, chunk, bias_V)
        add_products(op_C, grads_C, logits_CV, rows, accumulate=number > 0)
        if len(chunk) > 1:
            for grad, made in ((grads.hidden_ND, grads_C.hidden_ND), (grads.thin_NR, grads_C.thin_NR)):
                _write_rows(grad, made, chunk)


def _write_rows(grad: Tensor | None, made: Tensor | None, chunk: Chunk) -> None:
    if grad is None or made is None:
        return
    start = 0
    for part in chunk:
        rows = slice(start, start + part.stop - part.start)
        grad[part] = made[rows]
        start = rows.stop
