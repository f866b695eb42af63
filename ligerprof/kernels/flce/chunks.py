"""Fill losses and gradients of the fused loss as planned: block by block of the vocabulary, then chunk by chunk.

N tokens, D hidden, V vocabulary, C tokens of a chunk or of the scratch phase, B words of a block. The matrix products
are cuBLAS's; between them runs the row kernel of `ligerprof.kernels.ce.rows`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ligerprof.kernels.ce.rows import STATISTICS, LossCall, count_words, gradient_of_words, loss_and_gradient
from ligerprof.kernels.flce.plan import ChunkPlan, aligned, plan_chunks


@dataclass(frozen=True, slots=True)
class Operands:
    """The products' tensors, in the dtype they are computed in."""

    hidden_ND: Tensor
    weight_VD: Tensor


@dataclass(frozen=True, slots=True)
class Gradients:
    """Where the gradients go; None where one is not wanted."""

    hidden_ND: Tensor | None
    weight_VD: Tensor | None
    bias_V: Tensor | None

    @property
    def wanted(self) -> bool:
        """Whether any is."""
        return not (self.hidden_ND is None and self.weight_VD is None and self.bias_V is None)


def run_chunks(op: Operands, grads: Gradients, call: LossCall) -> None:
    """Fill the losses and the gradients, these scaled by the call's `scale`."""
    (tokens, hidden), dtype = op.hidden_ND.shape, op.hidden_ND.dtype
    plan = plan_chunks(
        tokens=tokens,
        hidden=hidden,
        vocab=call.vocab,
        element_bytes=dtype.itemsize,
        budget=call.options.budget,
        gradient_bytes=0 if grads.weight_VD is None else grads.weight_VD.itemsize,
    )
    workspace = torch.empty(plan.workspace_bytes // dtype.itemsize, dtype=dtype, device=op.hidden_ND.device)
    if plan.scratch_tokens:
        _run_scratch(op, grads, call, plan, workspace)
    for start in range(plan.scratch_tokens, tokens, max(plan.chunk_tokens, 1)):
        stop = min(start + plan.chunk_tokens, tokens)
        logits_CV = workspace[: (stop - start) * plan.row_elements].view(-1, plan.row_elements)[:, : call.vocab]
        _run_chunk(op, grads, call, start, logits_CV)


def _run_chunk(op: Operands, grads: Gradients, call: LossCall, start: int, logits_CV: Tensor) -> None:
    chunk = slice(start, start + logits_CV.shape[0])
    torch.mm(op.hidden_ND[chunk], op.weight_VD.t(), out=logits_CV)
    grad_CV = logits_CV if grads.wanted else None
    loss_and_gradient(call, logits_CV, grad_CV, first_row=start, width=logits_CV.stride(0))
    # from here on the chunk holds the gradient of its logits
    if grads.hidden_ND is not None:
        torch.mm(logits_CV, op.weight_VD, out=grads.hidden_ND[chunk])
    _add_to_head(op.hidden_ND[chunk], grads.weight_VD, grads.bias_V, logits_CV, accumulate=start > 0)


def _add_to_head(
    hidden_CD: Tensor, weight_grad: Tensor | None, bias_grad: Tensor | None, grad_CB: Tensor, *, accumulate: bool
) -> None:
    """Write, or add to, the gradients of those of the head's rows and biases that made these logits."""
    if weight_grad is not None:
        _product_into(weight_grad, grad_CB.t(), hidden_CD, accumulate=accumulate)
    if bias_grad is not None:
        ones_1C = grad_CB.new_ones(1, grad_CB.shape[0])
        _product_into(bias_grad.view(1, -1), ones_1C, grad_CB, accumulate=accumulate)


@dataclass(frozen=True, slots=True)
class _Block:
    """Words of the vocabulary and where the logits of the scratch tokens for them are."""

    words: slice
    logits_CB: Tensor

    @property
    def place(self) -> dict[str, int]:
        """Where the row kernel finds it."""
        return {"first_row": 0, "first_word": self.words.start, "width": self.logits_CB.stride(0)}


def _run_scratch(op: Operands, grads: Gradients, call: LossCall, plan: ChunkPlan, workspace: Tensor) -> None:
    """The first tokens, with logits in the bytes of the head's gradient."""
    weight_grad = grads.weight_VD
    assert weight_grad is not None
    hidden_CD = op.hidden_ND[: plan.scratch_tokens]
    statistics, blocks = _lay_out(weight_grad, call, plan, workspace)
    for block in blocks:
        torch.mm(hidden_CD, op.weight_VD[block.words].t(), out=block.logits_CB)
        # while the block is in the cache
        count_words(call, block.logits_CB, statistics, **block.place)
    total_CD = _hidden_total(grads.hidden_ND, weight_grad, hidden_CD, blocks[-1].words.start)
    for number, block in enumerate(blocks):
        gradient_of_words(call, block.logits_CB, statistics, **block.place)
        if total_CD is not None:
            _product_into(total_CD, block.logits_CB, op.weight_VD[block.words], accumulate=number > 0)
    if grads.hidden_ND is not None and total_CD is not None:
        grads.hidden_ND[: plan.scratch_tokens].copy_(total_CD)
    for block in reversed(blocks):
        bias_grad = None if grads.bias_V is None else grads.bias_V[block.words]
        _add_to_head(hidden_CD, weight_grad[block.words], bias_grad, block.logits_CB, accumulate=False)


def _lay_out(weight_grad: Tensor, call: LossCall, plan: ChunkPlan, workspace: Tensor) -> tuple[Tensor, list[_Block]]:
    """Statistics [STATISTICS, C] in fp32 after block 0 in the workspace; block i in block i - 1's gradient."""
    tokens, dtype = plan.scratch_tokens, workspace.dtype
    free = workspace[plan.block_words * tokens :].view(torch.float32)
    statistics = free[: STATISTICS * tokens].view(STATISTICS, tokens)
    blocks = []
    for words in _word_blocks(call.vocab, plan.block_words):
        before = slice(words.start - plan.block_words, words.start)
        memory = weight_grad[before].view(-1).view(dtype) if words.start else workspace
        width = words.stop - words.start
        rows = memory[: tokens * aligned(width)].view(tokens, -1)
        blocks.append(_Block(words=words, logits_CB=rows[:, :width]))
    return statistics, blocks


def _word_blocks(vocab: int, block_words: int) -> Iterator[slice]:
    for start in range(0, vocab, block_words):
        yield slice(start, min(start + block_words, vocab))


def _hidden_total(hidden_grad: Tensor | None, weight_grad: Tensor, hidden_CD: Tensor, last_word: int) -> Tensor | None:
    """Where the hidden states' gradient is summed over blocks: in fp32, where the head's last gradients will be."""
    if hidden_grad is None:
        return None
    if hidden_grad.dtype == torch.float32:
        return hidden_grad[: hidden_CD.shape[0]]
    unwritten = weight_grad[last_word:].view(-1)
    elements = hidden_CD.numel() * torch.float32.itemsize // weight_grad.itemsize
    return unwritten[:elements].view(torch.float32).view(hidden_CD.shape)


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
