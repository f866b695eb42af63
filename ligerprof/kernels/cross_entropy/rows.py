"""The row kernels of both losses: from logits to each token's loss, prediction, and gradient of the logits.

Axes: N tokens (rows), V vocabulary, B words of one block of the vocabulary, S statistics.

    _cross_entropy_kernel       whole rows: loss and gradient; reads each row twice
    _block_statistics_kernel    one block of words: adds it to the rows' statistics; the last block writes the losses
    _block_gradient_kernel      one block of words: writes the gradient over the logits, from the finished statistics

`labels`, `loss`, `scale` and `prediction` are indexed by token number; `logits`, `grad` and `statistics` by row of the
launch, which starts at token `first_row`. See `formulas` for `words`, `width` and arguments that are None.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Callable, Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ligerprof.kernels.cross_entropy.arguments import Arguments, LossArguments
from ligerprof.kernels.cross_entropy.formulas import (
    label_logit,
    load_label,
    reduce_words,
    relative_exp,
    store_gradient,
    store_zeros,
    term_weights,
    token_loss,
)
from ligerprof.kernels.device import on_device

# per row: the highest logit, the sum of exponentials relative to it, the label's logit, the (weighted) sum of logits
STATISTICS = 4

# launch config of whole rows: one program per row, which it reads twice. Programs that fill a multiprocessor keep few
# rows in flight, so that the second reading hits the L2 cache; wide loads per thread keep the memory busy
_MAX_LANES = 8192
# launch config of a block: it is read once, and many small programs hide each other's latency
_BLOCK_LANES = 2048
_LANES_PER_WARP = 256
_MIN_WARPS = 4
# loaded per lane at a time: fewer where long formulas or many addresses take the registers
_BYTES_PER_LANE = 16
_FEWER_BYTES_PER_LANE = 8


def _depth(args: Arguments) -> int:
    """Elements per lane."""
    optional = ("softcap", "smoothing", "bias_ptr", "prediction_ptr")
    is_long = args["PADDED"] or any(args.get(name) is not None for name in optional)
    element_bytes = args["logits_ptr"].element_size()
    # rows that are not aligned are loaded element by element, each with its own address
    is_unaligned = args["logits_stride"] * element_bytes % _BYTES_PER_LANE != 0
    lane_bytes = _FEWER_BYTES_PER_LANE if is_long or is_unaligned else _BYTES_PER_LANE
    needed = triton.next_power_of_2(triton.cdiv(args["words"], args["LANES"]))
    return int(min(lane_bytes // element_bytes, needed))


def _tile(max_lanes: int) -> Mapping[str, Callable[[Arguments], Any]]:
    """Heuristics for a program that reads its words in tiles of [DEPTH, LANES]."""
    return {
        "PADDED": lambda args: args["width"] != args["words"],
        "LANES": lambda args: min(max_lanes, triton.next_power_of_2(args["words"])),
        "DEPTH": _depth,
        "num_warps": lambda args: max(args["LANES"] // _LANES_PER_WARP, _MIN_WARPS),
    }


@triton.heuristics(_tile(_MAX_LANES))
@triton.jit(do_not_specialize=["first_row", "seq_len", "ignore_index"])
def _cross_entropy_kernel(
    logits_ptr,
    grad_ptr,
    labels_ptr,
    loss_ptr,
    prediction_ptr,
    scale_ptr,
    bias_ptr,
    class_weight_ptr,
    class_weight_sum_ptr,
    logits_stride,
    grad_stride,
    scale_stride,
    first_row,
    words,
    width,
    seq_len,
    ignore_index,
    logit_scale,
    softcap,
    smoothing,
    z_weight,
    SHIFT: tl.constexpr,
    PADDED: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
):
    """One whole row: its loss, and the gradient times scale[token * scale_stride]. `grad` may be `logits`."""
    row = tl.program_id(0)
    token = first_row + row
    logits_ptr += row.to(tl.int64) * logits_stride
    if grad_ptr is not None:
        grad_ptr += row.to(tl.int64) * grad_stride
    label = load_label(labels_ptr, token, seq_len, ignore_index, SHIFT)
    if label == ignore_index:
        tl.store(loss_ptr + token, 0.0)
        if prediction_ptr is not None:
            tl.store(prediction_ptr + token, -1)
        if grad_ptr is not None:
            store_zeros(grad_ptr, width, DEPTH, LANES)
        return

    # a label outside the vocabulary makes its own row NaN and touches no other memory
    in_vocab = (label >= 0) & (label < words)
    # loaded here, needed only at the end
    scale = 1.0 if logit_scale is None else tl.cast(logit_scale, tl.float32)
    if scale_ptr is not None:
        scale *= tl.load(scale_ptr + token.to(tl.int64) * scale_stride).to(tl.float32)
    w_y = 1.0
    if class_weight_ptr is not None:
        w_y = tl.load(class_weight_ptr + label, mask=in_vocab, other=0.0).to(tl.float32)

    span = (0, words, width)
    formula = (bias_ptr, class_weight_ptr, logit_scale, softcap, smoothing)
    highest, total, z_sum, place = reduce_words(logits_ptr, prediction_ptr, span, formula, PADDED, DEPTH, LANES)
    z_y = tl.where(in_vocab, label_logit(logits_ptr, label, label, in_vocab, formula), float("nan"))
    if prediction_ptr is not None:
        tl.store(prediction_ptr + token, place.to(tl.int64))
    norm = (highest, tl.log2(total))
    terms = term_weights(w_y, words, smoothing, class_weight_ptr, class_weight_sum_ptr)
    tl.store(loss_ptr + token, token_loss(norm, z_y, z_sum, terms, z_weight))
    if grad_ptr is not None:
        # no thread may overwrite the label's logit before all have read it
        tl.debug_barrier()
        scale = tl.where(in_vocab, scale, float("nan"))
        store_gradient(
            logits_ptr,
            grad_ptr,
            span,
            formula,
            terms,
            z_weight,
            scale,
            norm,
            z_y,
            label,
            in_vocab,
            PADDED,
            DEPTH,
            LANES,
        )


@triton.heuristics(
    {
        **_tile(_BLOCK_LANES),
        "FIRST": lambda args: args["first_word"] == 0,
        "LAST": lambda args: args["first_word"] + args["words"] == args["vocab"],
    }
)
@triton.jit(do_not_specialize=["first_row", "seq_len", "ignore_index"])
def _block_statistics_kernel(
    logits_ptr,
    statistics_ptr,
    labels_ptr,
    loss_ptr,
    prediction_ptr,
    bias_ptr,
    class_weight_ptr,
    class_weight_sum_ptr,
    logits_stride,
    statistics_stride,
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
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    PADDED: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
):
    """One row's words from `first_word` on: the FIRST block starts the row's statistics, the LAST writes the loss."""
    row = tl.program_id(0)
    token = first_row + row
    logits_ptr += row.to(tl.int64) * logits_stride
    statistics_ptr += row
    label = load_label(labels_ptr, token, seq_len, ignore_index, SHIFT)
    if label == ignore_index:
        if LAST:
            tl.store(loss_ptr + token, 0.0)
        if prediction_ptr is not None:
            tl.store(prediction_ptr + token, -1)
        return

    in_vocab = (label >= 0) & (label < vocab)
    in_block = in_vocab & (label >= first_word) & (label < first_word + words)
    if FIRST:
        highest = float("-inf")
        total = 0.0
        z_y = tl.where(in_vocab, 0.0, float("nan"))
        z_sum = 0.0
    else:
        highest = tl.load(statistics_ptr)
        total = tl.load(statistics_ptr + statistics_stride)
        z_y = tl.load(statistics_ptr + 2 * statistics_stride)
        z_sum = tl.load(statistics_ptr + 3 * statistics_stride)
    span = (first_word, words, width)
    formula = (bias_ptr, class_weight_ptr, logit_scale, softcap, smoothing)
    block_highest, block_total, block_sum, place = reduce_words(
        logits_ptr, prediction_ptr, span, formula, PADDED, DEPTH, LANES
    )
    z_y += tl.where(in_block, label_logit(logits_ptr, label, label - first_word, in_block, formula), 0.0)
    z_sum += block_sum
    if prediction_ptr is not None:
        is_higher = block_highest > highest
        # the FIRST block writes in any case: later ones may hold no higher logit, or NaN
        tl.store(prediction_ptr + token, (first_word + place).to(tl.int64), mask=is_higher | FIRST)
    new_highest = tl.maximum(highest, block_highest)
    total = total * relative_exp(highest, new_highest) + block_total * relative_exp(block_highest, new_highest)
    tl.store(statistics_ptr, new_highest)
    tl.store(statistics_ptr + statistics_stride, total)
    tl.store(statistics_ptr + 2 * statistics_stride, z_y)
    tl.store(statistics_ptr + 3 * statistics_stride, z_sum)
    if LAST:
        w_y = 1.0
        if class_weight_ptr is not None:
            w_y = tl.load(class_weight_ptr + label, mask=in_vocab, other=0.0).to(tl.float32)
        terms = term_weights(w_y, vocab, smoothing, class_weight_ptr, class_weight_sum_ptr)
        norm = (new_highest, tl.log2(total))
        tl.store(loss_ptr + token, token_loss(norm, z_y, z_sum, terms, z_weight))


@triton.heuristics(_tile(_BLOCK_LANES))
@triton.jit(do_not_specialize=["first_row", "seq_len", "ignore_index"])
def _block_gradient_kernel(
    logits_ptr,
    statistics_ptr,
    labels_ptr,
    scale_ptr,
    bias_ptr,
    class_weight_ptr,
    class_weight_sum_ptr,
    logits_stride,
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
    PADDED: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
):
    """One row's words from `first_word` on: their gradient times scale[token * scale_stride], over the logits."""
    row = tl.program_id(0)
    token = first_row + row
    logits_ptr += row.to(tl.int64) * logits_stride
    statistics_ptr += row
    label = load_label(labels_ptr, token, seq_len, ignore_index, SHIFT)
    if label == ignore_index:
        store_zeros(logits_ptr, width, DEPTH, LANES)
        return

    in_vocab = (label >= 0) & (label < vocab)
    in_block = in_vocab & (label >= first_word) & (label < first_word + words)
    norm = (tl.load(statistics_ptr), tl.log2(tl.load(statistics_ptr + statistics_stride)))
    z_y = tl.load(statistics_ptr + 2 * statistics_stride)
    scale = 1.0 if logit_scale is None else tl.cast(logit_scale, tl.float32)
    if scale_ptr is not None:
        scale *= tl.load(scale_ptr + token.to(tl.int64) * scale_stride).to(tl.float32)
    scale = tl.where(in_vocab, scale, float("nan"))
    w_y = 1.0
    if class_weight_ptr is not None:
        w_y = tl.load(class_weight_ptr + label, mask=in_vocab, other=0.0).to(tl.float32)
    span = (first_word, words, width)
    formula = (bias_ptr, class_weight_ptr, logit_scale, softcap, smoothing)
    terms = term_weights(w_y, vocab, smoothing, class_weight_ptr, class_weight_sum_ptr)
    store_gradient(
        logits_ptr,
        logits_ptr,
        span,
        formula,
        terms,
        z_weight,
        scale,
        norm,
        z_y,
        label - first_word,
        in_block,
        PADDED,
        DEPTH,
        LANES,
    )


def loss_and_gradient(
    arguments: LossArguments, logits_NV: Tensor, grad_NV: Tensor | None, *, first_row: int = 0, width: int | None = None
) -> None:
    """Write the losses of whole rows, and the gradient of their logits.

    Args:
        grad_NV: receives the gradient and may be `logits_NV`; None if no gradient is wanted.
        first_row: token number of the first row.
        width: elements per row that may be read and written, if there are more than logits.
    """
    rows, words = logits_NV.shape
    with on_device(logits_NV):
        _cross_entropy_kernel[(rows,)](
            logits_ptr=logits_NV,
            grad_ptr=grad_NV,
            logits_stride=logits_NV.stride(0),
            grad_stride=0 if grad_NV is None else grad_NV.stride(0),
            first_row=first_row,
            words=words,
            width=words if width is None else width,
            **arguments.for_labels(),
            **arguments.for_results(),
            **arguments.for_gradient(),
        )


def count_words(
    arguments: LossArguments, logits_NB: Tensor, statistics_SN: Tensor, *, first_row: int, first_word: int
) -> None:
    """Add a block of words to the rows' statistics; the block with the last word of the vocabulary writes the losses.

    Blocks come in the order of the vocabulary: the first one initializes the statistics.
    """
    _launch_block(
        _block_statistics_kernel,
        logits_NB,
        statistics_SN,
        first_row=first_row,
        first_word=first_word,
        vocab=arguments.vocab,
        **arguments.for_labels(),
        **arguments.for_results(),
    )


def gradient_of_words(
    arguments: LossArguments, logits_NB: Tensor, statistics_SN: Tensor, *, first_row: int, first_word: int
) -> None:
    """Write a block's gradient over its logits, after all words were counted."""
    _launch_block(
        _block_gradient_kernel,
        logits_NB,
        statistics_SN,
        first_row=first_row,
        first_word=first_word,
        vocab=arguments.vocab,
        **arguments.for_labels(),
        **arguments.for_gradient(),
    )


def _launch_block(kernel: Any, logits_NB: Tensor, statistics_SN: Tensor, **arguments: Any) -> None:
    rows, words = logits_NB.shape
    with on_device(logits_NB):
        kernel[(rows,)](
            logits_ptr=logits_NB,
            statistics_ptr=statistics_SN,
            logits_stride=logits_NB.stride(0),
            statistics_stride=statistics_SN.stride(0),
            words=words,
            width=logits_NB.stride(0),
            **arguments,
        )
