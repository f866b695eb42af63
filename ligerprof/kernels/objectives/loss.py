"""An objective on the fused linear loss: log-probabilities of a few tokens at a time, the formula in plain torch.

Axes: B sequences, T positions, N tokens, C tokens of one chunk, D hidden, V vocabulary, S statistics.
A chunk is a list of slices of tokens, so that the two halves of a pair can be in one. Forward differentiates chunk by
chunk: three products of the head, and never the logits of all tokens.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligerprof.errors import KernelInputError
from ligerprof.kernels.cross_entropy.arguments import LossArguments
from ligerprof.kernels.cross_entropy.blocks import count_words, gradient_of_words
from ligerprof.kernels.cross_entropy.loss import check_labels
from ligerprof.kernels.cross_entropy.reference import next_labels
from ligerprof.kernels.cross_entropy.spec import statistics_per_token
from ligerprof.kernels.linear_cross_entropy.chunks import (
    Gradients,
    Inputs,
    Operands,
    add_products,
    finished,
    like,
    prepared,
)
from ligerprof.kernels.linear_cross_entropy.plan import BALANCED_BYTES, aligned, plan_chunks
from ligerprof.kernels.linear_cross_entropy.scores import linear_log_probs, per_token
from ligerprof.kernels.linear_cross_entropy.triton import check_head, scaled_gradients
from ligerprof.kernels.objectives.formulas import Data, Objective, objective
from ligerprof.kernels.options import PLAIN_LOSS, LossOptions, LossRequest, VocabularyShard
from ligerprof.kernels.sizes import slices_of
from ligerprof.kernels.tensors import first_order_only, product_dtype
from ligerprof.units import GIB

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
        ctx.per_token = like(hidden), like(thin)
        ctx.save_for_backward(*grads.in_order, None)
        return finish()

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        return *scaled_gradients(ctx, grad_loss).shaped(*ctx.per_token), *(None,) * 5


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
        op_C.write_logits(rows, slice(0, vocab), logits_CV)
        differentiate(logits_CV, chunk, bias_V)
        grads_C = dataclasses.replace(
            grads,
            hidden_ND=None if grads.hidden_ND is None else _empty_rows(grads.hidden_ND, chunk),
            thin_NR=None if grads.thin_NR is None else _empty_rows(grads.thin_NR, chunk),
        )
        add_products(op_C, grads_C, logits_CV, rows, accumulate=number > 0)
        if len(chunk) > 1:
            for grad, made in ((grads.hidden_ND, grads_C.hidden_ND), (grads.thin_NR, grads_C.thin_NR)):
                _write_rows(grad, made, chunk)


def _empty_rows(value: Tensor, chunk: Chunk) -> Tensor:
    """Memory for the rows of a chunk: their own if they follow each other."""
    size = sum(part.stop - part.start for part in chunk)
    return value[chunk[0]] if len(chunk) == 1 else value.new_empty(size, value.shape[1])


def _write_rows(grad: Tensor | None, made: Tensor | None, chunk: Chunk) -> None:
    if grad is None or made is None:
        return
    start = 0
    for part in chunk:
        rows = slice(start, start + part.stop - part.start)
        grad[part] = made[rows]
        start = rows.stop


# of the logits of a chunk for which `balanced` makes room where a smaller one costs time: a group, two sequences, or
# a student and a teacher. liger-kernel's chunks hold as many logits or more, in fp32
GROUP_BYTES = GIB


class ObjectiveOutputs(NamedTuple):
    """What an objective returns; only the loss has a gradient.

    Attributes:
        loss: one element, fp32.
        log_probs: [B, T], fp32; 0 where the label is ignored.
        entropy: [B, T], or None if the objective has no use for it.
        metrics: the objective's, by name.
    """

    loss: Tensor
    log_probs: Tensor
    entropy: Tensor | None
    metrics: Data


def linear_objective(
    of: Objective | str,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    options: LossOptions = PLAIN_LOSS,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    low_rank: tuple[Tensor, Tensor] | None = None,
    shard: VocabularyShard | None = None,
    reference: tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor] | None = None,
    **data: Tensor | float,
) -> ObjectiveOutputs:
    """An objective of post-training from hidden states and a head, without ever holding the logits of all tokens.

    If the budget holds the logits of a group (a pair, a sequence, or for losses of tokens 16 tokens), forward computes
    the gradients, which takes three products of the head. Otherwise backward computes the logits again, which takes a
    fourth; so do fp16, whose loss scale only backward knows, vocabularies over ranks, and torch.compile. The budget
    `balanced` makes room for two sequences, or one group, of up to `GROUP_BYTES`.

    Args:
        of: an objective of `formulas`, or the name of one.
        hidden: [B, T, D]; of pairs, the chosen sequences come first.
        weight: [V, D].
        labels: [B, T], int64; positions of the prompt and padding have `options.ignore_index`.
        options: shift, ignore_index, softcap, logit_scale, budget and accumulate_fp32 apply.
        bias: [V].
        temperature: divides the logits, before the softcap.
        low_rank: factors [B, T, R] and [V, R] whose product is added to the logits.
        reference: hidden states, head and bias of the reference; its log-probabilities become `ref_log_probs`.
        data: what the objective needs, by name: [B], [B, T] or one number.

    Raises:
        RecipeError: an unknown objective.
        KernelInputError: shapes do not match, or data is missing.
    """
    of = objective(of) if isinstance(of, str) else of
    thin, wide = (None, None) if low_rank is None else low_rank
    check_head("objective", hidden, weight, labels, bias, low_rank)
    if labels.ndim != 2:
        raise KernelInputError(f"objective: labels have the shape {tuple(labels.shape)}. Give [sequences, positions].")
    targets = next_labels(labels, options).to(hidden.device)
    options = dataclasses.replace(options, shift=False)
    check_labels(targets, options, weight.shape[0] if shard is None else shard.vocab)
    if reference is not None:
        ref_hidden, ref_weight, *ref_bias = reference
        with torch.no_grad():
            scores = linear_log_probs(
                ref_hidden, ref_weight, targets, options, *ref_bias, temperature=temperature, shard=shard
            )
        data["ref_log_probs"] = scores.log_probs
    inputs = (hidden, weight, bias, thin, wide)
    dtype = product_dtype(hidden)
    wants = torch.is_grad_enabled() and any(value is not None and value.requires_grad for value in inputs)
    chunks: list[Chunk] = []
    if wants and shard is None and dtype != torch.float16 and not torch.compiler.is_compiling():
        chunks = _plan(of, targets, weight, dtype, options)
    if not chunks:
        log_probs, entropy = linear_log_probs(
            hidden,
            weight,
            targets,
            options,
            bias,
            temperature=temperature,
            entropy=of.needs_entropy,
            shard=shard,
            low_rank=low_rank,
        )
        mask = targets != options.ignore_index
        found, metrics = of(log_probs, mask, **of.prepare(mask, _checked(data, labels)), **_named(entropy))
        return ObjectiveOutputs(found, log_probs.detach(), None if entropy is None else entropy.detach(), metrics)
    plain = dataclasses.replace(per_token(options, temperature), check_labels=False)
    scored = _Scored(of, targets, data, plain, weight.shape[0])
    request = LossRequest(labels=targets, options=plain)
    loss: Tensor = ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        *inputs, dtype, request, chunks, scored.differentiate, scored.finish
    )
    return ObjectiveOutputs(loss, scored.log_probs, scored.entropy, scored.metrics)


def _checked(data: dict[str, Tensor | float], labels: Tensor) -> Data:
    """The data as constants on the labels' device, numbers as one per sequence, but for `num_items`."""
    given: Data = {}
    for name, value in data.items():
        tensor = torch.as_tensor(value, device=labels.device).detach()
        if tensor.is_floating_point():
            tensor = tensor.float() if tensor.dtype != torch.float64 else tensor
        if tensor.shape in ((), (1,)) and name != "num_items":
            tensor = tensor.expand(labels.shape[0])
        if tensor.ndim > 0 and tensor.shape not in (labels.shape, labels.shape[:1]):
            raise KernelInputError(
                f"objective: {name} has the shape {tuple(tensor.shape)}, next to labels {tuple(labels.shape)}. Give one"
                " value, one for each sequence, or one for each position."
            )
        given[name] = tensor
    return given


def _plan(of: Objective, labels: Tensor, weight: Tensor, dtype: torch.dtype, options: LossOptions) -> list[Chunk]:
    """Chunks of whole groups that the budget holds; none if it holds no group, or there are no tokens."""
    sequences, positions = labels.shape
    tokens, budget = sequences * positions, options.budget
    if tokens == 0:
        return []
    if budget == "balanced" and of.group:
        sequence_bytes = positions * aligned(weight.shape[0]) * dtype.itemsize
        # one sequence has few tokens for a product: two, as a pair has, if they fit
        rooms = (count * sequence_bytes for count in (of.group, 2))
        budget = max(BALANCED_BYTES, *(room if room <= GROUP_BYTES else 0 for room in rooms))
    largest = plan_chunks(
        tokens=tokens,
        hidden=weight.shape[1],
        vocab=weight.shape[0],
        element_bytes=dtype.itemsize,
        budget=budget,
    ).chunk_tokens
    if of.group == 0:
        return [(tokens_C,) for tokens_C in slices_of(0, tokens, largest)]
    groups, fitting = sequences // of.group, largest // (of.group * positions)
    if fitting == 0:
        return []
    size = -(-groups // -(-groups // fitting))
    return [
        tuple(
            slice((half * groups + first) * positions, (half * groups + min(first + size, groups)) * positions)
            for half in range(of.group)
        )
        for first in range(0, groups, size)
    ]


class _Scored:
    """Differentiates an objective with respect to a chunk's logits, through log-probabilities and entropies.

    Data is prepared while the GPU computes the first logits.
    """

    def __init__(
        self, of: Objective, labels: Tensor, given: "dict[str, Tensor | float]", options: LossOptions, vocab: int
    ) -> None:
        self._of, self._labels, self._given, self._options, self._vocab = of, labels, given, options, vocab
        self._labels_N = labels.reshape(-1).contiguous()
        # a loss of tokens sees each as a sequence of one
        self._positions = labels.shape[1] if of.group else 1
        self.log_probs = torch.empty(labels.shape, device=labels.device)
        self.entropy = torch.empty_like(self.log_probs) if of.needs_entropy else None
        self.metrics: Data = {}

    @cached_property
    def _mask(self) -> Tensor:
        return self._labels != self._options.ignore_index

    @cached_property
    def _data(self) -> Data:
        return self._of.prepare(self._mask, _checked(self._given, self._labels))

    @cached_property
    def _rows(self) -> Data:
        return {name: self._by_row(value) for name, value in {**self._data, "mask": self._mask}.items()}

    def _by_row(self, value: Tensor) -> Tensor:
        return value if self._of.group or value.ndim < 2 else value.reshape(-1, 1)

    def differentiate(self, logits_CV: Tensor, chunk: Chunk, bias_V: Tensor | None) -> None:
        """Overwrite logits with the objective's gradient."""
        tokens, has_entropy = logits_CV.shape[0], self._of.needs_entropy
        arguments = LossArguments(
            labels_N=rows_of(self._labels_N, chunk).contiguous(),
            loss_N=self.log_probs.new_empty(tokens),
            entropy_N=self.log_probs.new_empty(tokens) if has_entropy else None,
            seq_len=1,
            vocab=self._vocab,
            words=self._vocab,
            options=self._options,
            bias_V=bias_V,
            computes_entropy=has_entropy,
        )
        statistics_SC = self.log_probs.new_empty(statistics_per_token(entropy=has_entropy), tokens)
        count_words(arguments, logits_CV, statistics_SC, first_row=0, is_last=True, is_padded=True)
        log_probs, entropy = -arguments.loss_N, arguments.entropy_N
        self._keep(log_probs, entropy, chunk)
        grads = self._gradients(log_probs, entropy, chunk)
        of_log_probs, of_entropy = (None if grad is None else grad.reshape(-1).contiguous() for grad in grads)
        arguments = dataclasses.replace(
            arguments,
            scale=torch.zeros_like(log_probs) if of_log_probs is None else -of_log_probs,
            entropy_grad_N=of_entropy,
            computes_entropy=of_entropy is not None,
        )
        gradient_of_words(arguments, logits_CV, statistics_SC, first_row=0)

    @torch.enable_grad()
    def _gradients(
        self, log_probs: Tensor, entropy: Tensor | None, chunk: Chunk
    ) -> tuple[Tensor | None, Tensor | None]:
        shape = (-1, self._positions)
        scores = [log_probs.view(shape).requires_grad_()]
        if entropy is not None:
            scores.append(entropy.view(shape).requires_grad_())
        sequences = tuple(slice(part.start // self._positions, part.stop // self._positions) for part in chunk)
        data = {name: rows_of(value, sequences) for name, value in self._rows.items()}
        loss, _ = self._of(scores[0], data.pop("mask"), **data, **_named(*scores[1:]))
        of_log_probs, *of_entropy = torch.autograd.grad(loss, scores, allow_unused=True)
        return of_log_probs, of_entropy[0] if of_entropy else None

    def _keep(self, log_probs: Tensor, entropy: Tensor | None, chunk: Chunk) -> None:
        start = 0
        for part in chunk:
            rows = slice(start, start + part.stop - part.start)
            self.log_probs.view(-1)[part] = log_probs[rows]
            if self.entropy is not None and entropy is not None:
                self.entropy.view(-1)[part] = entropy[rows]
            start = rows.stop

    def finish(self) -> Tensor:
        """The loss of the whole batch, from the scores of all chunks."""
        loss, self.metrics = self._of(self.log_probs, self._mask, **self._data, **_named(self.entropy))
        return loss


def _named(entropy: Tensor | None = None) -> Data:
    return {} if entropy is None else {"entropy": entropy}
