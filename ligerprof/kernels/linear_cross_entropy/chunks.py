"""Fill losses and gradients of the fused loss as planned: block by block of the vocabulary, then chunk by chunk.

N tokens, D hidden, V vocabulary, C tokens of a chunk or of the scratch phase, B words of a block. The matrix products
are cuBLAS's; between them runs the row kernel of `ligerprof.kernels.cross_entropy.rows`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ligerprof.kernels.cross_entropy.rows import STATISTICS, LossCall, count_words, gradient_of_words, loss_and_gradient
from ligerprof.kernels.linear_cross_entropy.plan import ChunkPlan, aligned, plan_chunks


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
        _Scratch(op, grads, call, plan, workspace).run()
    for chunk in () if plan.recomputed else _later_chunks(plan, tokens):
        logits = workspace[: (chunk.stop - chunk.start) * plan.row_elements]
        _run_chunk(op, grads, call, chunk, logits.view(-1, plan.row_elements)[:, : call.vocab])


def _later_chunks(plan: ChunkPlan, tokens: int) -> Iterator[slice]:
    for number in range(plan.chunks):
        start = plan.scratch_tokens + number * plan.chunk_tokens
        yield slice(start, min(start + plan.chunk_tokens, tokens))


def _run_chunk(op: Operands, grads: Gradients, call: LossCall, chunk: slice, logits_CV: Tensor) -> None:
    torch.mm(op.hidden_ND[chunk], op.weight_VD.t(), out=logits_CV)
    grad_CV = logits_CV if grads.wanted else None
    loss_and_gradient(call, logits_CV, grad_CV, first_row=chunk.start, width=logits_CV.stride(0))
    # from here on the chunk holds the gradient of its logits
    if grads.hidden_ND is not None:
        torch.mm(logits_CV, op.weight_VD, out=grads.hidden_ND[chunk])
    _add_to_head(grads, slice(0, call.vocab), op.hidden_ND[chunk], logits_CV, accumulate=chunk.start > 0)


def _add_to_head(grads: Gradients, words: slice, hidden_CD: Tensor, grad_CB: Tensor, *, accumulate: bool) -> None:
    """Write, or add to, the gradients of the head's rows and biases that made these logits."""
    if grads.weight_VD is not None:
        _product_into(grads.weight_VD[words], grad_CB.t(), hidden_CD, accumulate=accumulate)
    if grads.bias_V is not None:
        ones_1C = grad_CB.new_ones(1, grad_CB.shape[0])
        _product_into(grads.bias_V[words].view(1, -1), ones_1C, grad_CB, accumulate=accumulate)


@dataclass(frozen=True, slots=True)
class _Block:
    """Words of the vocabulary, and where a chunk's logits for them are."""

    words: slice
    logits_CB: Tensor


class _Scratch:
    """Tokens with logits in the bytes of the head's gradient, before it is written."""

    def __init__(self, op: Operands, grads: Gradients, call: LossCall, plan: ChunkPlan, workspace: Tensor) -> None:
        assert grads.weight_VD is not None
        tokens = op.hidden_ND.shape[0]
        self._op, self._grads, self._call, self._plan, self._workspace = op, grads, call, plan, workspace
        self._weight_grad = grads.weight_VD
        self._first = slice(0, plan.scratch_tokens)
        self._later = tuple(_later_chunks(plan, tokens)) if plan.recomputed else ()
        # after block 0
        free = workspace[plan.block_words * plan.scratch_tokens :].view(torch.float32)
        self._statistics = free[: STATISTICS * tokens].view(STATISTICS, tokens)

    def run(self) -> None:
        """Fill what the plan gives to the scratch."""
        for chunk in (*self._later, self._first):
            blocks = self._lay_out(chunk)
            self._count(chunk, blocks)
            self._differentiate(chunk, blocks)
        for block in reversed(blocks):
            _add_to_head(self._grads, block.words, self._op.hidden_ND[chunk], block.logits_CB, accumulate=False)
        for chunk in self._later:
            self._recompute(chunk)

    def _lay_out(self, chunk: slice) -> list[_Block]:
        """Block 0 in the workspace, block i where block i - 1's gradient will be."""
        blocks = []
        for words in self._words():
            before = slice(words.start - self._plan.block_words, words.start)
            memory = self._weight_grad[before].view(-1).view(self._workspace.dtype) if words.start else self._workspace
            blocks.append(_block(words, chunk, memory))
        return blocks

    def _words(self) -> Iterator[slice]:
        vocab, words = self._call.vocab, self._plan.block_words
        for start in range(0, vocab, words):
            yield slice(start, min(start + words, vocab))

    def _count(self, chunk: slice, blocks: list[_Block]) -> None:
        for block in blocks:
            self._make_logits(chunk, block)
            # while the block is in the cache
            count_words(self._call, block.logits_CB, self._statistics[:, chunk], **_place(chunk, block))

    def _make_logits(self, chunk: slice, block: _Block) -> None:
        torch.mm(self._op.hidden_ND[chunk], self._op.weight_VD[block.words].t(), out=block.logits_CB)

    def _make_gradient(self, chunk: slice, block: _Block) -> None:
        gradient_of_words(self._call, block.logits_CB, self._statistics[:, chunk], **_place(chunk, block))

    def _differentiate(self, chunk: slice, blocks: list[_Block]) -> None:
        """Logits become their gradient, and that the hidden states'."""
        total_CD = self._hidden_total(chunk, blocks[-1].words.start)
        for block in blocks:
            self._make_gradient(chunk, block)
            if total_CD is not None:
                weight_BD = self._op.weight_VD[block.words]
                _product_into(total_CD, block.logits_CB, weight_BD, accumulate=block.words.start > 0)
        if self._grads.hidden_ND is not None and total_CD is not None:
            self._grads.hidden_ND[chunk].copy_(total_CD)

    def _hidden_total(self, chunk: slice, last_word: int) -> Tensor | None:
        """Where the hidden states' gradient is summed over blocks: in fp32, where the head's last rows will be."""
        hidden_grad = self._grads.hidden_ND
        if hidden_grad is None:
            return None
        chunk_CD = hidden_grad[chunk]
        if chunk_CD.dtype == torch.float32:
            return chunk_CD
        unwritten = self._weight_grad[last_word:].view(-1)
        elements = chunk_CD.numel() * torch.float32.itemsize // unwritten.itemsize
        return unwritten[:elements].view(torch.float32).view(chunk_CD.shape)

    def _recompute(self, chunk: slice) -> None:
        """The head's gradient of tokens whose logits were overwritten."""
        for words in self._words():
            block = _block(words, chunk, self._workspace)
            self._make_logits(chunk, block)
            self._make_gradient(chunk, block)
            _add_to_head(self._grads, words, self._op.hidden_ND[chunk], block.logits_CB, accumulate=True)


def _block(words: slice, chunk: slice, memory: Tensor) -> _Block:
    tokens, width = chunk.stop - chunk.start, words.stop - words.start
    rows = memory[: tokens * aligned(width)].view(tokens, -1)
    return _Block(words, rows[:, :width])


def _place(chunk: slice, block: _Block) -> dict[str, int]:
    """Where the row kernel finds a block."""
    return {"first_row": chunk.start, "first_word": block.words.start, "width": block.logits_CB.stride(0)}


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
