"""The row kernel of both losses: from logits to the tokens' losses, predictions and the gradient over the logits.

N tokens (rows), V vocabulary. A launch sees whole rows, or the words of one block of the vocabulary: statistics of a
row are then carried from block to block. Inside, logits are in base 2: exp2 is one instruction.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ligerprof.kernels.device import on_device
from ligerprof.kernels.options import LossOptions

# of a row: its highest logit, the sum of exponents over it, the label's logit, the sum of (weighted) logits
STATISTICS = 4

# launch: one program a row, which reads it twice. Programs that fill a multiprocessor keep the rows under way few
# enough for the L2 cache, so that the second reading comes from there; what a thread loads at once keeps memory busy
_MAX_LANES = 8192
# a block of words is read once: many small programs hide each other's waits
_BLOCK_LANES = 2048
_LANES_PER_WARP = 256
_MIN_WARPS = 4
_BYTES_PER_LANE = 16
_BYTES_PER_LANE_OF_LONG_FORMULAS = 8

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossCall:
    """What a launch is told of all tokens, whichever rows it takes.

    Attributes:
        labels_N: contiguous.
        seq_len: tokens a sequence, where the options shift.
        vocab: words of the whole vocabulary.
        loss_N: takes the losses in fp32, or None.
        scale: factor on the gradient, one element, or one a token; None is one.
        bias_V: added to the logits, or None.
        class_weight_V: weight of each word, or None; `class_weight_sum` is their sum, one element.
        prediction_N: takes the likeliest word of each token, -1 where the label is ignored; or None.
    """

    labels_N: Tensor
    seq_len: int
    vocab: int
    options: LossOptions
    loss_N: Tensor | None = None
    scale: Tensor | None = None
    bias_V: Tensor | None = None
    class_weight_V: Tensor | None = None
    class_weight_sum: Tensor | None = None
    prediction_N: Tensor | None = None


@triton.jit
def _logits(raw, words, mask, bias_ptr, scale, softcap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """Stored logits as the loss sees them, in fp32 and base 2."""
    z = raw.to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias_ptr + words, mask=mask, other=0.0).to(tl.float32)
    if HAS_SOFTCAP:
        # tanh(u) = 1 - 2 / (1 + e^2u)
        return (softcap * _LOG2_E) * (1.0 - 2.0 / (1.0 + tl.exp2((2.0 * scale / softcap * _LOG2_E) * z)))
    return z * (scale * _LOG2_E)


@triton.jit
def _gradient(z, lse, of_softmax, spread, softcap, HAS_SOFTCAP: tl.constexpr, HAS_SPREAD: tl.constexpr):
    """Gradient of stored logits, from logits in base 2; `spread` is the target's share."""
    grad = tl.exp2(z - lse) * of_softmax
    if HAS_SPREAD:
        grad -= spread
    if HAS_SOFTCAP:
        capped = z / (softcap * _LOG2_E)
        grad *= 1.0 - capped * capped
    return grad


@triton.jit(do_not_specialize=["first_row", "seq_len", "ignore_index"])
def cross_entropy_kernel(
    logits_ptr,
    grad_ptr,
    statistics_ptr,
    labels_ptr,
    loss_ptr,
    scale_ptr,
    bias_ptr,
    class_weight_ptr,
    class_weight_sum_ptr,
    prediction_ptr,
    logits_stride,
    grad_stride,
    statistics_stride,
    scale_stride,
    first_row,
    first_word,
    words,
    width,
    vocab,
    seq_len,
    ignore_index,
    logit_scale,
    softcap,
    smoothing,
    z_weight,
    SHIFT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_PREDICTION: tl.constexpr,
    PADDED: tl.constexpr,
    READ_STATISTICS: tl.constexpr,
    COUNT: tl.constexpr,
    WRITE_STATISTICS: tl.constexpr,
    WRITE_LOSS: tl.constexpr,
    WRITE_GRAD: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
):
    """One row, or its `words` words from `first_word` on: loss, and the gradient times scale[token * scale_stride].

    Statistics start at nothing or are read, the launch's words are counted in or already were, and they are kept or
    not. `labels`, `loss`, `scale` and `prediction` are indexed by the token's own number; `logits`, `grad` and
    `statistics` by the row of the chunk. `grad` may be `logits`. A pointer that its flag switches off is never read.
    Rows hold `width` elements, of which the last width - words mean nothing and may be written: an aligned width keeps
    loads wide where the vocabulary is odd.
    """
    logit_scale = tl.cast(logit_scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    smoothing = tl.cast(smoothing, tl.float32)
    z_weight = tl.cast(z_weight, tl.float32)
    row = tl.program_id(0)
    token = first_row + row
    logits_ptr += row.to(tl.int64) * logits_stride
    grad_ptr += row.to(tl.int64) * grad_stride
    statistics_ptr += row
    BLOCK: tl.constexpr = DEPTH * LANES
    block = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    if SHIFT:
        has_next = token % seq_len + 1 < seq_len
        label = tl.load(labels_ptr + token + 1, mask=has_next, other=ignore_index)
    else:
        label = tl.load(labels_ptr + token)

    if label == ignore_index:
        if WRITE_LOSS:
            tl.store(loss_ptr + token, 0.0)
        if HAS_PREDICTION:
            tl.store(prediction_ptr + token, -1)
        if WRITE_GRAD:
            for start in range(0, width, BLOCK):
                zeros = tl.zeros([DEPTH, LANES], dtype=tl.float32).to(grad_ptr.dtype.element_ty)
                tl.store(grad_ptr + start + block, zeros, mask=start + block < width)
        return

    # a label outside the vocabulary makes its own row NaN and touches no other memory
    in_vocab = (label >= 0) & (label < vocab)
    place = label - first_word
    in_block = in_vocab & (place >= 0) & (place < words)
    highest = -3.0e38
    total = 0.0
    z_y = tl.where(in_vocab, 0.0, float("nan"))
    z_sum = 0.0
    if READ_STATISTICS:
        highest = tl.load(statistics_ptr)
        total = tl.load(statistics_ptr + statistics_stride)
        z_y = tl.load(statistics_ptr + 2 * statistics_stride)
        z_sum = tl.load(statistics_ptr + 3 * statistics_stride)
    # asked for here and awaited at the end
    token_scale = 1.0
    if WRITE_GRAD and HAS_SCALE:
        token_scale = tl.load(scale_ptr + token.to(tl.int64) * scale_stride).to(tl.float32)
    w_y = 1.0
    if HAS_CLASS_WEIGHT:
        w_y = tl.load(class_weight_ptr + label, mask=in_vocab, other=0.0).to(tl.float32)

    if COUNT:
        # every lane keeps its own maximum and sum, so that no thread waits for another inside the loop.
        # not -inf: a lane of nothing but -inf must not make inf - inf
        lane_highest = tl.full([LANES], -3.0e38, tl.float32)
        lane_total = tl.zeros([LANES], tl.float32)
        lane_sum = tl.zeros([LANES], tl.float32)
        lane_word = tl.zeros([LANES], tl.int32)
        for start in range(0, width, BLOCK):
            offsets = start + block
            mask = offsets < words
            # kept in the L2 cache for the second reading, whose own loads and stores make way for others
            raw = tl.load(logits_ptr + offsets, mask=offsets < width, other=float("-inf"), eviction_policy="evict_last")
            z = _logits(raw, first_word + offsets, mask, bias_ptr, logit_scale, softcap, HAS_BIAS, HAS_SOFTCAP)
            if PADDED or HAS_SOFTCAP:
                z = tl.where(mask, z, float("-inf"))
            if HAS_SMOOTHING:
                summed = tl.where(mask, z, 0.0)
                if HAS_CLASS_WEIGHT:
                    summed *= tl.load(class_weight_ptr + first_word + offsets, mask=mask, other=0.0).to(tl.float32)
                lane_sum += tl.sum(summed, 0)
            if HAS_PREDICTION:
                top, depth = tl.max(z, 0, return_indices=True)
                lane_word = tl.where(top > lane_highest, start + depth * LANES + tl.arange(0, LANES), lane_word)
            new_highest = tl.maximum(lane_highest, tl.max(z, 0))
            lane_total = lane_total * tl.exp2(lane_highest - new_highest)
            lane_total += tl.sum(tl.exp2(z - new_highest[None, :]), 0)
            lane_highest = new_highest
        # the cache has it by now
        raw_y = tl.load(logits_ptr + place, mask=in_block, other=0.0)
        z_y += tl.where(
            in_block, _logits(raw_y, label, in_block, bias_ptr, logit_scale, softcap, HAS_BIAS, HAS_SOFTCAP), 0.0
        )
        z_sum += tl.sum(lane_sum)
        block_highest = tl.max(lane_highest)
        if HAS_PREDICTION:
            word = first_word + tl.min(tl.where(lane_highest == block_highest, lane_word, vocab))
            tl.store(prediction_ptr + token, word.to(tl.int64), mask=block_highest > highest)
        new_highest = tl.maximum(highest, block_highest)
        total *= tl.exp2(highest - new_highest)
        total += tl.sum(lane_total * tl.exp2(lane_highest - new_highest))
        highest = new_highest

    if WRITE_STATISTICS:
        tl.store(statistics_ptr, highest)
        tl.store(statistics_ptr + statistics_stride, total)
        tl.store(statistics_ptr + 2 * statistics_stride, z_y)
        tl.store(statistics_ptr + 3 * statistics_stride, z_sum)

    # weight of the label's own term, and of the terms of all words together and each
    lse = highest + tl.log2(total)
    own = w_y
    all_words = 0.0
    each_word = 0.0
    if HAS_SMOOTHING:
        own *= 1.0 - smoothing
        each_word = smoothing / vocab
        all_words = smoothing
        if HAS_CLASS_WEIGHT:
            all_words = each_word * tl.load(class_weight_sum_ptr).to(tl.float32)

    if WRITE_LOSS:
        loss = own * (lse - z_y) + all_words * lse - each_word * z_sum
        tl.store(loss_ptr + token, (loss + w_y * z_weight * _LN_2 * lse * lse) * _LN_2)

    if WRITE_GRAD:
        # no thread may overwrite the label's logit while another still reads it
        tl.debug_barrier()
        scale = tl.where(in_vocab, logit_scale * token_scale, float("nan"))
        of_softmax = scale * (own + all_words + 2.0 * w_y * z_weight * _LN_2 * lse)
        each_word *= scale
        for start in range(0, width, BLOCK):
            offsets = start + block
            mask = offsets < words
            inside = offsets < width
            raw = tl.load(logits_ptr + offsets, mask=inside, other=float("-inf"), eviction_policy="evict_first")
            z = _logits(raw, first_word + offsets, mask, bias_ptr, logit_scale, softcap, HAS_BIAS, HAS_SOFTCAP)
            if PADDED:
                z = tl.where(mask, z, float("-inf"))
            spread = each_word
            if HAS_CLASS_WEIGHT and HAS_SMOOTHING:
                spread *= tl.load(class_weight_ptr + first_word + offsets, mask=mask, other=0.0).to(tl.float32)
            grad = _gradient(z, lse, of_softmax, spread, softcap, HAS_SOFTCAP, HAS_SMOOTHING)
            stored = grad.to(grad_ptr.dtype.element_ty)
            tl.store(grad_ptr + offsets, stored, mask=inside, eviction_policy="evict_first")
        # the label's own: one word is cheaper to write twice than every word to compare
        tl.debug_barrier()
        spread = own * scale
        if HAS_SMOOTHING:
            spread += each_word * w_y
        grad_y = _gradient(z_y, lse, of_softmax, spread, softcap, HAS_SOFTCAP, HAS_SPREAD=True)
        tl.store(grad_ptr + place, grad_y.to(grad_ptr.dtype.element_ty), mask=in_block)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Words:
    """Which words of the rows a launch takes, and what it does with the rows' statistics [STATISTICS, rows]."""

    first: int = 0
    width: int | None = None
    statistics: Tensor | None = None
    count: bool = True
    last: bool = True


def loss_and_gradient(
    call: LossCall, logits_NV: Tensor, grad_NV: Tensor | None, *, first_row: int = 0, width: int | None = None
) -> None:
    """Losses of whole rows, and the gradient of their logits.

    Args:
        grad_NV: takes the gradient, may be `logits_NV`; None where none is wanted.
        first_row: number of the first row's token.
        width: elements of a row that may be read and written, where there are more than logits.
    """
    _launch(call, logits_NV, grad_NV, first_row, _Words(width=width))


def count_words(
    call: LossCall, logits: Tensor, statistics: Tensor, *, first_row: int, first_word: int, width: int
) -> None:
    """Count a block of words into the rows' statistics; after the vocabulary's last word, write the losses.

    Blocks come in order: the first one starts the statistics.
    """
    last = first_word + logits.shape[1] == call.vocab
    _launch(call, logits, None, first_row, _Words(first=first_word, width=width, statistics=statistics, last=last))


def gradient_of_words(
    call: LossCall, logits: Tensor, statistics: Tensor, *, first_row: int, first_word: int, width: int
) -> None:
    """Write a block's gradient over its logits, once all words are counted."""
    words = _Words(first=first_word, width=width, statistics=statistics, count=False)
    _launch(call, logits, logits, first_row, words)


def _launch(call: LossCall, logits: Tensor, grad: Tensor | None, first_row: int, of: _Words) -> None:
    options, (rows, words) = call.options, logits.shape
    width = words if of.width is None else of.width
    depth, lanes, warps = _tile(call, words, width, logits.element_size(), alone=of.statistics is None)
    target = logits if grad is None else grad
    with on_device(logits):
        cross_entropy_kernel[(rows,)](
            logits,
            target,
            _or_labels(call, of.statistics),
            call.labels_N,
            _or_labels(call, call.loss_N),
            _or_labels(call, call.scale),
            _or_labels(call, call.bias_V),
            _or_labels(call, call.class_weight_V),
            _or_labels(call, call.class_weight_sum),
            _or_labels(call, call.prediction_N),
            logits.stride(0),
            target.stride(0),
            0 if of.statistics is None else of.statistics.stride(0),
            0 if call.scale is None or call.scale.numel() == 1 else 1,
            first_row,
            of.first,
            words,
            width,
            call.vocab,
            call.seq_len,
            options.ignore_index,
            options.logit_scale,
            1.0 if options.softcap is None else options.softcap,
            options.label_smoothing,
            options.z_loss,
            SHIFT=options.shift,
            HAS_SCALE=call.scale is not None,
            HAS_BIAS=call.bias_V is not None,
            HAS_SOFTCAP=options.softcap is not None,
            HAS_SMOOTHING=options.label_smoothing > 0,
            HAS_CLASS_WEIGHT=call.class_weight_V is not None,
            HAS_PREDICTION=call.prediction_N is not None and of.count,
            PADDED=width != words,
            READ_STATISTICS=of.statistics is not None and not (of.count and of.first == 0),
            COUNT=of.count,
            WRITE_STATISTICS=of.statistics is not None and of.count,
            WRITE_LOSS=call.loss_N is not None and of.count and of.last,
            WRITE_GRAD=grad is not None,
            DEPTH=depth,
            LANES=lanes,
            num_warps=warps,
        )


def _or_labels(call: LossCall, value: Tensor | None) -> Tensor:
    """A pointer that is not read must still be one."""
    return call.labels_N if value is None else value


def _tile(call: LossCall, words: int, width: int, element_bytes: int, *, alone: bool) -> tuple[int, int, int]:
    """Elements a lane, lanes and warps of a program: as many bytes at once as registers hold."""
    options = call.options
    plain = options.softcap is None and options.label_smoothing == 0 and width == words
    plain = plain and call.bias_V is None and call.prediction_N is None
    lane_bytes = _BYTES_PER_LANE if plain else _BYTES_PER_LANE_OF_LONG_FORMULAS
    lanes = min(_MAX_LANES if alone else _BLOCK_LANES, triton.next_power_of_2(words))
    depth = min(lane_bytes // element_bytes, triton.next_power_of_2(triton.cdiv(words, lanes)))
    return depth, lanes, max(lanes // _LANES_PER_WARP, _MIN_WARPS)
