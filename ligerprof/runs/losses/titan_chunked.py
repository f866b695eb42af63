"""torchtitan's chunked loss, for `--loss titan-chunked`: head, loss and their backward in eight chunks of the tokens.

Written from `ChunkedLossWrapper` and `GradAccumulator` in torchtitan/components/loss.py (August 2026). The gradients of
the head's weight exist before the model's backward begins, which starts from an fp32 sum of the chunks' gradients of
the hidden states.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ligerprof.torch_memory.chunked_losses import TITAN_CHUNKS


def make_forward(labelled_tokens: int, grad_accum: int) -> Callable[..., Any]:
    """A model's forward with this loss.

    Args:
        labelled_tokens: tokens of a micro-batch whose successor has a label.
        grad_accum: micro-batches per step; the head's gradients are divided by it, as the trainer divides the loss.
    """
    divisor = max(labelled_tokens, 1) * grad_accum

    def forward(self: Any, input_ids: Tensor, labels: Tensor, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        hidden = self.base_model(input_ids=input_ids, **kwargs)[0]
        rows = hidden.view(-1, hidden.size(-1))
        shifted = functional.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
        loss = _loss(rows, self.get_output_embeddings(), shifted, divisor)
        return CausalLMOutputWithPast(loss=loss * grad_accum)

    return forward


def _loss(hidden: Tensor, head: Any, labels: Tensor, divisor: int) -> Tensor:
    needs_gradient = hidden.requires_grad
    size = len(labels) // TITAN_CHUNKS
    chunks = [part.contiguous().detach().requires_grad_(needs_gradient) for part in torch.split(hidden, size)]
    gradients = torch.zeros_like(hidden, dtype=torch.float32) if needs_gradient else None
    total = hidden.new_zeros((), dtype=torch.float32)
    for number, (chunk, of_chunk) in enumerate(zip(chunks, torch.split(labels, size), strict=True)):
        logits = head(chunk)
        loss = functional.cross_entropy(logits.float(), of_chunk, reduction="sum", ignore_index=-100) / divisor
        total = total + loss.detach()
        if gradients is not None:
            torch.autograd.backward(loss)
            gradient, chunk.grad = chunk.grad, None
            assert gradient is not None
            gradients[number * size : (number + 1) * size] = gradient.to(torch.float32)
            del gradient
    if gradients is None:
        return total
    loss_of_all: Tensor = _GradientOfHidden.apply(hidden, gradients.to(hidden.dtype), total)  # type: ignore[no-untyped-call]
    return loss_of_all


class _GradientOfHidden(torch.autograd.Function):
    """The loss, with a gradient of the hidden states that is already computed."""

    @staticmethod
    def forward(ctx: Any, _hidden: Tensor, gradient: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> Any:
        return *ctx.saved_tensors, None, None
