"""Compute losses and gradients of the fused loss as planned: first the scratch tokens, then the others by chunks.

Axes: N tokens, D hidden, V vocabulary, R rank of adapters, C tokens of one chunk or of the scratch, B words of one
block of the vocabulary, S statistics. cuBLAS computes the matrix products; between them run the row kernels of
cross_entropy.
"""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ligerprof.kernels.cross_entropy.arguments import LossArguments
from ligerprof.kernels.cross_entropy.blocks import gradient_of_words, loss_and_gradient_of_blocks
from ligerprof.kernels.cross_entropy.factors import sum_scale
from ligerprof.kernels.cross_entropy.loss import (
    Launch,
    compute_loss,
    compute_waiting_gradients,
    even_share,
    loss_and_gradient_of_shard,
    sum_over_ranks,
)
from ligerprof.kernels.cross_entropy.rows import loss_and_gradient
from ligerprof.kernels.cross_entropy.spec import statistics_per_token
from ligerprof.kernels.linear_cross_entropy.plan import ChunkPlan, aligned, plan_chunks
from ligerprof.kernels.options import IncomingGradients, LossOutputs, LossRequest
from ligerprof.kernels.sizes import slices_of

# shape and dtype of a tensor
Like = tuple[torch.Size, torch.dtype]
# a block of the vocabulary, and a chunk's logits [C, B] for it
_Block = tuple[slice, Tensor]


@dataclass(frozen=True, slots=True)
class Operands:
    """Operands of the matrix products, in the products' dtype, and the bias in its own.

    The logits are `hidden_ND @ weight_VD.T + bias_V + thin_NR @ wide_VR.T`.
    """

    hidden_ND: Tensor
    weight_VD: Tensor
    bias_V: Tensor | None = None
    thin_NR: Tensor | None = None
    wide_VR: Tensor | None = None
    fp32_logits: bool = False

    @property
    def logits_dtype(self) -> torch.dtype:
        """The dtype that logits are stored in."""
        return torch.float32 if self.fp32_logits else self.hidden_ND.dtype

    @property
    def bias_in_product(self) -> bool:
        """Whether the product adds the bias, before it rounds; otherwise the row kernels do, in fp32."""
        return self.bias_V is not None and self.bias_V.dtype == self.hidden_ND.dtype == self.logits_dtype

    def write_logits(self, tokens: slice, words: slice, out: Tensor) -> None:
        """Write the logits of tokens for a block of words."""
        hidden_CD, weight_DB = self.hidden_ND[tokens], self.weight_VD[words].t()
        if self.bias_V is not None and self.bias_in_product:
            torch.addmm(self.bias_V[words], hidden_CD, weight_DB, out=out)
        else:
            product_into(out, hidden_CD, weight_DB, accumulate=False)
        if self.thin_NR is not None and self.wide_VR is not None:
            product_into(out, self.thin_NR[tokens], self.wide_VR[words].t(), accumulate=True)


@dataclass(frozen=True, slots=True)
class Gradients:
    """Buffers for the gradients; None for one that is not wanted.

    Those of weight_VD, bias_V and wide_VR are sums over the tokens, times `sum_scale`.
    """

    hidden_ND: Tensor | None
    weight_VD: Tensor | None
    bias_V: Tensor | None
    thin_NR: Tensor | None = None
    wide_VR: Tensor | None = None
    sum_scale: float = 1.0

    @property
    def sums(self) -> tuple[Tensor | None, ...]:
        """The gradients that are sums over the tokens."""
        return self.weight_VD, self.bias_V, self.wide_VR

    @property
    def in_order(self) -> tuple[Tensor | None, ...]:
        """The gradients in the order of `Inputs`."""
        return self.hidden_ND, self.weight_VD, self.bias_V, self.thin_NR, self.wide_VR

    def shaped(self, hidden: Like, thin: Like | None) -> tuple[Tensor | None, ...]:
        """`in_order`, with shape and dtype of the tensors that have a row per token."""
        of_tokens = (
            None if grad is None or like is None else grad.view(like[0]).to(like[1])
            for grad, like in ((self.hidden_ND, hidden), (self.thin_NR, thin))
        )
        hidden_grad, thin_grad = of_tokens
        return hidden_grad, self.weight_VD, self.bias_V, thin_grad, self.wide_VR

    @property
    def wanted(self) -> bool:
        """Whether any gradient is wanted."""
        return any(grad is not None for grad in self.in_order)


def run_chunks(op: Operands, grads: Gradients, arguments: LossArguments) -> None:
    """Write the losses, and the gradients times `arguments.scale`."""
    (tokens, hidden), dtype = op.hidden_ND.shape, op.logits_dtype
    if tokens == 0:
        for grad in grads.sums:
            if grad is not None:
                grad.zero_()
        return
    arguments = dataclasses.replace(arguments, bias_V=None if op.bias_in_product else op.bias_V)
    # statistics of a shard are exchanged chunk by chunk; the scratch has no gradients of adapters
    has_scratch = grads.weight_VD is not None and arguments.shard is None and op.thin_NR is None
    # ranks exchange each chunk, so that those with other numbers of words must plan the same chunks
    words = arguments.words if arguments.shard is None else even_share(arguments.shard)
    plan = plan_chunks(
        tokens=tokens,
        hidden=hidden,
        vocab=words,
        element_bytes=dtype.itemsize,
        budget=arguments.options.budget,
        gradient_bytes=grads.weight_VD.itemsize if has_scratch and grads.weight_VD is not None else 0,
        entropy=arguments.computes_entropy,
    )
    if words != arguments.words:
        row_elements = aligned(arguments.words)
        workspace_bytes = plan.chunk_tokens * row_elements * dtype.itemsize
        plan = dataclasses.replace(plan, row_elements=row_elements, workspace_bytes=workspace_bytes)
    workspace = torch.empty(plan.workspace_bytes // dtype.itemsize, dtype=dtype, device=op.hidden_ND.device)
    if plan.scratch_tokens:
        _Scratch(op, grads, arguments, plan, workspace).run()
    for chunk in () if plan.recomputed else slices_of(plan.scratch_tokens, tokens, plan.chunk_tokens):
        logits = workspace[: (chunk.stop - chunk.start) * plan.row_elements]
        _run_chunk(op, grads, arguments, chunk, logits.view(-1, plan.row_elements)[:, : arguments.words])


def _run_chunk(op: Operands, grads: Gradients, arguments: LossArguments, chunk: slice, logits_CV: Tensor) -> None:
    words = slice(0, arguments.words)
    op.write_logits(chunk, words, logits_CV)
    if arguments.shard is None:
        grad_CV = logits_CV if grads.wanted else None
        loss_and_gradient(arguments, logits_CV, grad_CV, first_row=chunk.start, width=logits_CV.stride(0))
    else:
        loss_and_gradient_of_shard(
            arguments, logits_CV, wants_gradient=grads.wanted, first_row=chunk.start, is_padded=True
        )
    add_products(op, grads, logits_CV, chunk, accumulate=chunk.start > 0)


def add_products(op: Operands, grads: Gradients, grad_CV: Tensor, chunk: slice, *, accumulate: bool) -> None:
    """Multiply the gradient of a chunk's logits into all others; sums over tokens are added to if `accumulate`."""
    if grads.hidden_ND is not None:
        torch.mm(grad_CV, op.weight_VD, out=grads.hidden_ND[chunk])
    if grads.thin_NR is not None and op.wide_VR is not None:
        torch.mm(grad_CV, op.wide_VR, out=grads.thin_NR[chunk])
    if grads.wide_VR is not None and op.thin_NR is not None:
        product_into(grads.wide_VR, grad_CV.t(), op.thin_NR[chunk], grads.sum_scale, accumulate=accumulate)
    _add_to_head(grads, (slice(0, op.weight_VD.shape[0]), grad_CV), op.hidden_ND[chunk], accumulate=accumulate)


def _add_to_head(grads: Gradients, block: _Block, hidden_CD: Tensor, *, accumulate: bool) -> None:
    """Write or accumulate the gradients of the head's weight rows and biases of a block, from that of its logits."""
    words, grad_CB = block
    if grads.weight_VD is not None:
        product_into(grads.weight_VD[words], grad_CB.t(), hidden_CD, grads.sum_scale, accumulate=accumulate)
    if grads.bias_V is not None:
        ones_1C = grad_CB.new_ones(1, grad_CB.shape[0])
        product_into(grads.bias_V[words].view(1, -1), ones_1C, grad_CB, grads.sum_scale, accumulate=accumulate)


class _Scratch:
    """Tokens whose logits lie in the memory of the head's gradient, before that gradient is written.

    Memory of n blocks of words, which may become larger from one to the next if C is less than D:

        workspace          | logits of block 0 [C, B]                        | statistics [S, N], fp32 |
        head's gradient
          rows of block 0    | logits of block 1 [C, B]                      |
          rows of block 1    | logits of block 2 [C, B]                      |
          ...
          rows of block n-2  | logits of block n-1 [C, B]                    |
          rows of block n-1  | sum of the hidden states' gradient [C, D], fp32 |

    1. For each block in order: compute its logits. Then one launch writes the losses, and the logits' gradient over
       the logits.
    2. For each block in order: add its gradient's product to the hidden states' sum, which is copied out after the
       last block.
    3. For each block from the last to the first: write the head's gradient of its rows. This overwrites the next
       block's logits, which are no longer needed, and never those of an earlier block.

    If the plan recomputes, whole rows of later chunks' logits lie in the memory of the head's gradient before those of
    the scratch tokens, and the statistics of these rows are kept. After step 3 the logits are computed again, block by
    block in the workspace, for the head's gradient.
    """

    def __init__(
        self, op: Operands, grads: Gradients, arguments: LossArguments, plan: ChunkPlan, workspace: Tensor
    ) -> None:
        assert grads.weight_VD is not None
        self._op, self._grads, self._arguments, self._plan, self._workspace = op, grads, arguments, plan, workspace
        self._weight_grad_VD = grads.weight_VD
        self._tokens = op.hidden_ND.shape[0]
        count = statistics_per_token(entropy=arguments.computes_entropy) if plan.recomputed else 0
        after_block_0 = workspace[plan.block_elements :].view(torch.float32)
        self._statistics_SN = after_block_0[: count * self._tokens].view(count, self._tokens)

    def run(self) -> None:
        """Process the tokens that the plan assigns to the scratch."""
        if self._plan.recomputed:
            for chunk in slices_of(self._plan.scratch_tokens, self._tokens, self._plan.chunk_tokens):
                self._run_whole_rows(chunk)
        chunk = slice(0, self._plan.scratch_tokens)
        blocks = self._lay_out(chunk)
        for block in blocks:
            self._op.write_logits(chunk, *block)
        self._run_rows(chunk, blocks)
        self._differentiate(chunk, blocks)
        for block in reversed(blocks):
            _add_to_head(self._grads, block, self._op.hidden_ND[chunk], accumulate=False)
        if self._plan.recomputed:
            for chunk in slices_of(self._plan.scratch_tokens, self._tokens, self._plan.recomputed_tokens):
                self._recompute(chunk)

    def _run_whole_rows(self, chunk: slice) -> None:
        """Losses, statistics and the hidden states' gradient of tokens whose logits will be computed again."""
        memory = self._weight_grad_VD.view(-1).view(self._workspace.dtype)
        words, logits_CV = _block(slice(0, self._arguments.words), chunk, memory)
        self._op.write_logits(chunk, words, logits_CV)
        loss_and_gradient(
            self._arguments,
            logits_CV,
            logits_CV,
            first_row=chunk.start,
            width=logits_CV.stride(0),
            statistics_SN=self._statistics_SN[:, chunk],
        )
        if self._grads.hidden_ND is not None:
            torch.mm(logits_CV, self._op.weight_VD, out=self._grads.hidden_ND[chunk])

    def _lay_out(self, chunk: slice) -> list[_Block]:
        blocks: list[_Block] = []
        memory, start = self._workspace, 0
        for size in self._plan.blocks:
            words = slice(start, start + size)
            blocks.append(_block(words, chunk, memory))
            memory, start = self._weight_grad_VD[words].view(-1).view(self._workspace.dtype), words.stop
        return blocks

    def _run_rows(self, chunk: slice, blocks: list[_Block]) -> None:
        _, first_CB = blocks[0]
        head = self._weight_grad_VD.view(-1).view(first_CB.dtype)
        word_elements = head.numel() // self._weight_grad_VD.shape[0]
        loss_and_gradient_of_blocks(
            self._arguments,
            first_CB,
            head,
            self._plan.blocks,
            growth=self._plan.growth(word_elements),
            word_elements=word_elements,
            first_row=chunk.start,
        )

    def _differentiate(self, chunk: slice, blocks: list[_Block]) -> None:
        last_words, _ = blocks[-1]
        sum_CD = self._hidden_sum(chunk, last_words.start)
        if self._grads.hidden_ND is None or sum_CD is None:
            return
        for words, logits_CB in blocks:
            product_into(sum_CD, logits_CB, self._op.weight_VD[words], accumulate=words.start > 0)
        self._grads.hidden_ND[chunk].copy_(sum_CD)

    def _hidden_sum(self, chunk: slice, last_word: int) -> Tensor | None:
        """The buffer that sums the hidden states' gradient over the blocks; None if it is not wanted."""
        hidden_grad_ND = self._grads.hidden_ND
        if hidden_grad_ND is None:
            return None
        grad_CD = hidden_grad_ND[chunk]
        if grad_CD.dtype == torch.float32:
            return grad_CD
        last_rows = self._weight_grad_VD[last_word:].view(-1)
        elements = grad_CD.numel() * torch.float32.itemsize // last_rows.itemsize
        return last_rows[:elements].view(torch.float32).view(grad_CD.shape)

    def _recompute(self, chunk: slice) -> None:
        """Add the head's gradient of tokens whose logits were overwritten."""
        vocab, most = self._arguments.words, self._plan.recomputed_words(chunk.stop - chunk.start)
        size = aligned(-(-vocab // -(-vocab // most)))
        for of_block in slices_of(0, vocab, size):
            block = _block(of_block, chunk, self._workspace)
            self._op.write_logits(chunk, *block)
            words, logits_CB = block
            statistics_SC = self._statistics_SN[:, chunk]
            gradient_of_words(self._arguments, logits_CB, statistics_SC, first_row=chunk.start, first_word=words.start)
            _add_to_head(self._grads, block, self._op.hidden_ND[chunk], accumulate=True)


def _block(words: slice, chunk: slice, memory: Tensor) -> _Block:
    tokens, width = chunk.stop - chunk.start, words.stop - words.start
    rows = memory[: tokens * aligned(width)].view(tokens, -1)
    return words, rows[:, :width]


def product_into(out: Tensor, left: Tensor, right: Tensor, factor: float = 1.0, *, accumulate: bool) -> None:
    """Write left @ right * factor to `out`, or add it to `out`, which may be fp32 if the operands are not."""
    if out.dtype != left.dtype and not (left.is_cuda or isinstance(left, FakeTensor)):
        # on the CPU, torch has no product with a wider result
        left, right = left.to(out.dtype), right.to(out.dtype)
    wider = {} if out.dtype == left.dtype else {"out_dtype": out.dtype}
    if accumulate or factor != 1.0:
        torch.addmm(out, left, right, **wider, beta=int(accumulate), alpha=factor, out=out)
    else:
        torch.mm(left, right, **wider, out=out)


# hidden states [..., D], weight [V, D], bias [V], and of adapters: thin [..., R], wide [V, R]
Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


def like(value: Tensor | None) -> Like | None:
    """Shape and dtype of a tensor, if there is one."""
    return None if value is None else (value.shape, value.dtype)


def loss_and_gradients(
    inputs: Inputs, dtype: torch.dtype, request: LossRequest, wanted: tuple[bool, ...]
) -> tuple[LossOutputs, Gradients, Tensor | None]:
    """The results, their gradients, and the factor that each gradient still lacks, or None.

    See `waits_for_loss_scale` for the factor. There are no gradients if they wait.

    Args:
        dtype: of the matrix products.
        wanted: which inputs want a gradient.
    """
    op, grads, launch = prepared(inputs, dtype, request, tuple(want and not request.waits for want in wanted))
    outputs, late = compute_loss(request, inputs[1].shape[0], launch, op.hidden_ND)
    if late is not None:
        of_sums = late / grads.sum_scale
        late = torch.cat((late, of_sums, of_sums, late, of_sums))
    return outputs, finished(grads, inputs, request), late


def waiting_gradients(
    inputs: Inputs, dtype: torch.dtype, request: LossRequest, incoming: IncomingGradients, wanted: tuple[bool, ...]
) -> Gradients:
    """The gradients of a request whose gradients wait for those of its results."""
    op, grads, launch = prepared(inputs, dtype, request, wanted)
    compute_waiting_gradients(request, incoming, inputs[1].shape[0], launch, op.hidden_ND)
    return finished(grads, inputs, request)


def prepared(
    inputs: Inputs, dtype: torch.dtype, request: LossRequest, wanted: tuple[bool, ...]
) -> tuple[Operands, Gradients, Launch]:
    """The operands of the products, uninitialized gradients, and what launches the rows."""
    hidden, weight_VD, bias_V, thin, wide_VR = inputs
    # the logits' gradient, which overwrites them, is an operand of the products
    fp32_logits = request.options.fp32_logits and not any(wanted)
    op = Operands(
        hidden.reshape(-1, hidden.shape[-1]).to(dtype),
        weight_VD.to(dtype),
        None if bias_V is None else bias_V.contiguous(),
        None if thin is None else thin.reshape(-1, thin.shape[-1]).to(dtype),
        None if wide_VR is None else wide_VR.to(dtype),
        fp32_logits,
    )
    grads = _empty_gradients(op, inputs, request, wanted)
    return op, grads, lambda arguments: run_chunks(op, grads, arguments)


def _empty_gradients(op: Operands, inputs: Inputs, request: LossRequest, wanted: tuple[bool, ...]) -> Gradients:
    """Uninitialized buffers: the products of the first tokens overwrite them."""
    _, weight_VD, bias_V, _, wide_VR = inputs

    def sum_for(like: Tensor, parameter: Tensor) -> Tensor:
        # products have no narrower results than their operands
        wider = torch.promote_types(op.weight_VD.dtype, parameter.dtype)
        dtype = torch.float32 if request.options.accumulate_fp32 else wider
        return torch.empty(like.shape, dtype=dtype, device=like.device)

    return Gradients(
        hidden_ND=torch.empty_like(op.hidden_ND, memory_format=torch.contiguous_format) if wanted[0] else None,
        weight_VD=sum_for(weight_VD, weight_VD) if wanted[1] else None,
        bias_V=sum_for(bias_V, weight_VD) if bias_V is not None and wanted[2] else None,
        thin_NR=torch.empty_like(op.thin_NR) if op.thin_NR is not None and wanted[3] else None,
        wide_VR=sum_for(wide_VR, wide_VR) if wide_VR is not None and wanted[4] else None,
        # in backward the products' operands have their factors already
        sum_scale=1.0 if request.waits else sum_scale(op.hidden_ND.dtype, op.hidden_ND.shape[0]),
    )


def finished(grads: Gradients, inputs: Inputs, request: LossRequest) -> Gradients:
    """Cast the sums to their parameters' dtypes; gradients per token are cast in backward."""
    _, weight_VD, bias_V, _, wide_VR = inputs
    if request.shard is not None and request.shard.sum_hidden_gradient:
        for grad in (grads.hidden_ND, grads.thin_NR):
            if grad is not None:
                sum_over_ranks(grad, request.shard)
    return dataclasses.replace(
        grads,
        weight_VD=_cast(grads.weight_VD, weight_VD),
        bias_V=_cast(grads.bias_V, bias_V),
        wide_VR=_cast(grads.wide_VR, wide_VR),
    )


def _cast(grad: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    return None if grad is None or parameter is None else grad.to(parameter.dtype)
