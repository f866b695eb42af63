"""The row kernels for words that come in blocks: of the vocabulary, or of a rank's part of it.

Axes: N tokens (rows), B words of one block, S statistics.

    _block_statistics_kernel    one block of words: adds it to the rows' statistics; the last block writes the results
    _block_gradient_kernel      one block of words: writes the gradient over the logits, from the finished statistics
    _split_row_kernel           rows that lie in several blocks of memory, the fused loss's scratch: reads a row twice

The logits of the scratch's block 0 are a tensor [C, B]. Those of each later block lie in the memory of the head's
gradient, in the rows of the words of the block before: see `chunks._Scratch`. Blocks of a row have one size, or each is
larger than the one before by the same factor; the last one has the rest.

As in `rows`; `statistics` are indexed by row of the launch. Unless `vocab_start` is None, it is the word of the whole
vocabulary at which the words begin.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ligerprof.kernels.cross_entropy.arguments import LossArguments
from ligerprof.kernels.cross_entropy.formulas import (
    add_words,
    entropy_of,
    factors_of_token,
    finish_words,
    label_logit,
    label_probability,
    load_label,
    merged_totals,
    moved_spread,
    no_words,
    reduce_words,
    relative_exp,
    store_gradient,
    store_ignored_results,
    store_label_gradient,
    store_results,
    store_statistics,
    store_words_gradient,
    store_zeros,
    term_weights,
)
from ligerprof.kernels.cross_entropy.rows import tile, tile_of_blocks, wait_for_turn, waiting_rows
from ligerprof.kernels.device import on_device

# launch config of a block: it is read once, and many small programs hide each other's latency
_BLOCK_LANES = 2048
# rows of the scratch's blocks start at multiples of this
_ALIGNMENT = tl.constexpr(16)


@triton.heuristics(tile(_BLOCK_LANES))
@triton.jit(do_not_specialize=["first_row", "seq_len", "ignore_index"])
def _block_statistics_kernel(
    logits_ptr,
    statistics_ptr,
    labels_ptr,
    loss_ptr,
    prediction_ptr,
    lse_ptr,
    entropy_ptr,
    z_loss_ptr,
    bias_ptr,
    class_weight_ptr,
    class_weight_sums_ptr,
    logits_stride,
    statistics_stride,
    first_row,
    first_word,
    words,
    width,
    vocab,
    vocab_start,
    seq_len,
    ignore_index,
    logit_scale,
    softcap,
    smoothing,
    z_weight,
    SHIFT: tl.constexpr,
    TOKEN_SCALING: tl.constexpr,
    ENTROPY: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    PADDED: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
):
    """One row's words from `first_word` on: the FIRST block starts the row's statistics, the LAST writes results."""
    row = tl.program_id(0)
    token = first_row + row
    logits_ptr += row.to(tl.int64) * logits_stride
    statistics_ptr += row
    results = (loss_ptr, lse_ptr, entropy_ptr, z_loss_ptr)
    label = load_label(labels_ptr, token, seq_len, ignore_index, SHIFT)
    if label == ignore_index:
        if LAST:
            store_ignored_results(results, prediction_ptr, token)
        return

    in_vocab = (label >= 0) & (label < vocab)
    if vocab_start is not None:
        label -= vocab_start
    in_block = in_vocab & (label >= first_word) & (label < first_word + words)
    if FIRST:
        highest = float("-inf")
        total = 0.0
        z_y = tl.where(in_vocab, 0.0, float("nan"))
        z_sum = 0.0
        z_spread = 0.0
    else:
        highest = tl.load(statistics_ptr)
        total = tl.load(statistics_ptr + statistics_stride)
        z_y = tl.load(statistics_ptr + 2 * statistics_stride)
        z_sum = tl.load(statistics_ptr + 3 * statistics_stride)
        z_spread = 0.0
        if ENTROPY:
            z_spread = tl.load(statistics_ptr + 4 * statistics_stride)
    span = (first_word, words, width)
    formula = (bias_ptr, class_weight_ptr, logit_scale, softcap, smoothing)
    block_highest, block_total, block_sum, block_spread, place = reduce_words(
        logits_ptr, prediction_ptr, span, formula, (ENTROPY, PADDED, DEPTH, LANES)
    )
    z_y += tl.where(in_block, label_logit(logits_ptr, label, label - first_word, in_block, formula), 0.0)
    z_sum += block_sum
    if prediction_ptr is not None:
        is_higher = block_highest > highest
        word = place.to(tl.int64)
        if vocab_start is not None:
            word += vocab_start
        # the FIRST block writes in any case: later ones may hold no higher logit, or NaN
        tl.store(prediction_ptr + token, word, mask=is_higher | FIRST)
    new_highest, new_total = merged_totals(highest, total, block_highest, block_total)
    if ENTROPY:
        # before the FIRST block there are no words
        if not FIRST:
            z_spread = moved_spread(total, z_spread, highest, new_highest) * relative_exp(highest, new_highest)
        block_spread = moved_spread(block_total, block_spread, block_highest, new_highest)
        z_spread += block_spread * relative_exp(block_highest, new_highest)
    store_statistics(statistics_ptr, statistics_stride, (new_highest, new_total, z_y, z_sum, z_spread), ENTROPY)
    if LAST:
        w_y = 1.0
        if class_weight_ptr is not None:
            w_y = tl.load(class_weight_ptr + label, mask=in_vocab, other=0.0).to(tl.float32)
        terms = term_weights(w_y, vocab, smoothing, z_weight, class_weight_ptr, class_weight_sums_ptr)
        norm = (new_highest, tl.log2(new_total))
        entropy = 0.0
        if ENTROPY:
            entropy = entropy_of(norm, new_total, z_spread)
        store_results(results, token, norm, z_y, z_sum, entropy, terms, TOKEN_SCALING)


@triton.heuristics(tile(_BLOCK_LANES))
@triton.jit(do_not_specialize=["first_row", "seq_len", "ignore_index"])
def _block_gradient_kernel(
    logits_ptr,
    statistics_ptr,
    labels_ptr,
    scale_ptr,
    lse_grad_ptr,
    entropy_grad_ptr,
    bias_ptr,
    class_weight_ptr,
    class_weight_sums_ptr,
    logits_stride,
    statistics_stride,
    scale_stride,
    first_row,
    first_word,
    words,
    width,
    vocab,
    vocab_start,
    seq_len,
    ignore_index,
    logit_scale,
    softcap,
    smoothing,
    z_weight,
    SHIFT: tl.constexpr,
    TOKEN_SCALING: tl.constexpr,
    ENTROPY: tl.constexpr,
    PADDED: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
):
    """One row's words from `first_word` on: their gradient, the loss's times scale[token * scale_stride]."""
    row = tl.program_id(0)
    token = first_row + row
    logits_ptr += row.to(tl.int64) * logits_stride
    statistics_ptr += row
    label = load_label(labels_ptr, token, seq_len, ignore_index, SHIFT)
    if label == ignore_index:
        store_zeros(logits_ptr, width, DEPTH, LANES)
        return

    in_vocab = (label >= 0) & (label < vocab)
    if vocab_start is not None:
        label -= vocab_start
    in_block = in_vocab & (label >= first_word) & (label < first_word + words)
    total = tl.load(statistics_ptr + statistics_stride)
    norm = (tl.load(statistics_ptr), tl.log2(total))
    z_y = tl.load(statistics_ptr + 2 * statistics_stride)
    scale, chain, w_y = factors_of_token(scale_ptr, scale_stride, class_weight_ptr, logit_scale, token, label, in_vocab)
    scale = tl.where(in_vocab, scale, float("nan"))
    if TOKEN_SCALING:
        scale *= label_probability(norm, z_y)
    entropy = 0.0
    if ENTROPY:
        entropy = entropy_of(norm, total, tl.load(statistics_ptr + 4 * statistics_stride))
    others = (lse_grad_ptr, entropy_grad_ptr, token, chain, entropy)
    span = (first_word, words, width)
    formula = (bias_ptr, class_weight_ptr, logit_scale, softcap, smoothing)
    terms = term_weights(w_y, vocab, smoothing, z_weight, class_weight_ptr, class_weight_sums_ptr)
    place = label - first_word
    parts = (span, formula, terms, scale, norm, others)
    store_gradient(logits_ptr, logits_ptr, parts, z_y, place, in_block, (ENTROPY, PADDED, DEPTH, LANES))


def count_words(
    arguments: LossArguments,
    logits_NB: Tensor,
    statistics_SN: Tensor,
    *,
    first_row: int,
    first_word: int = 0,
    is_last: bool,
    is_padded: bool,
) -> None:
    """Add a block of words to the rows' statistics; the last block writes the results.

    Blocks come in the order of the vocabulary: the first one initializes the statistics.

    Args:
        is_padded: whether the elements between the rows may be read.
    """
    _launch_block(
        _block_statistics_kernel,
        logits_NB,
        statistics_SN,
        is_padded=is_padded,
        first_row=first_row,
        first_word=first_word,
        FIRST=first_word == 0,
        LAST=is_last,
        **arguments.for_words(),
        **arguments.for_labels(),
        **arguments.for_results(),
    )


def gradient_of_words(
    arguments: LossArguments,
    logits_NB: Tensor,
    statistics_SN: Tensor,
    *,
    first_row: int,
    first_word: int = 0,
    is_padded: bool = True,
) -> None:
    """Write a block's gradient over its logits, after all words were counted."""
    _launch_block(
        _block_gradient_kernel,
        logits_NB,
        statistics_SN,
        is_padded=is_padded,
        first_row=first_row,
        first_word=first_word,
        **arguments.for_words(),
        **arguments.for_labels(),
        **arguments.for_gradient(),
    )


def finish_rows(arguments: LossArguments, statistics_SN: Tensor, *, first_row: int) -> None:
    """Write the results of rows whose statistics are complete."""
    no_words_N0 = statistics_SN.new_empty(statistics_SN.shape[1], 0)
    # a block of no words adds nothing
    count_words(
        arguments,
        no_words_N0,
        statistics_SN,
        first_row=first_row,
        first_word=arguments.words,
        is_last=True,
        is_padded=False,
    )


def _launch_block(kernel: Any, logits_NB: Tensor, statistics_SN: Tensor, *, is_padded: bool, **arguments: Any) -> None:
    rows, words = logits_NB.shape
    with on_device(logits_NB):
        kernel[(rows,)](
            logits_ptr=logits_NB,
            statistics_ptr=statistics_SN,
            logits_stride=logits_NB.stride(0),
            statistics_stride=statistics_SN.stride(0),
            words=words,
            width=logits_NB.stride(0) if is_padded else words,
            **arguments,
        )


@triton.jit
def _find_block(memory, row, number, place):
    """Where a row's block begins, its words, and its words with padding."""
    first_ptr, rest_ptr, word_elements, blocks, all_words = memory
    start, before, size = place
    words = tl.where(number == blocks - 1, all_words - start, size)
    width = (words + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
    in_block = row * tl.cast(width, tl.int64)
    in_rest = tl.cast(before, tl.int64) * word_elements + in_block
    # not where(): the pointers' alignment must remain known
    offset = tl.multiple_of(tl.where(number == 0, in_block, in_rest), 16)
    base = first_ptr
    if number > 0:
        base = rest_ptr
    return base + offset, words, width


@triton.jit
def _next_place(place, words, grow_to, grow_from):
    """The first word of the next block, of the block before it, and the size of the next block."""
    start, _, size = place
    grown = tl.cast(size, tl.int64) * grow_to // grow_from // _ALIGNMENT * _ALIGNMENT
    return start + words, start, grown.to(tl.int32)


@triton.jit(
    do_not_specialize=[
        "first_row",
        "seq_len",
        "ignore_index",
        "blocks",
        "grow_to",
        "grow_from",
        "first_rows",
    ]
)
def _split_row_kernel(
    first_ptr,
    rest_ptr,
    labels_ptr,
    loss_ptr,
    prediction_ptr,
    lse_ptr,
    entropy_ptr,
    z_loss_ptr,
    scale_ptr,
    lse_grad_ptr,
    entropy_grad_ptr,
    bias_ptr,
    class_weight_ptr,
    class_weight_sums_ptr,
    word_elements,
    scale_stride,
    first_row,
    first_words,
    grow_to,
    grow_from,
    blocks,
    words,
    seq_len,
    ignore_index,
    logit_scale,
    softcap,
    smoothing,
    z_weight,
    first_rows,
    SHIFT: tl.constexpr,
    TOKEN_SCALING: tl.constexpr,
    ENTROPY: tl.constexpr,
    PADDED: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
):
    """One row: its results, and the gradient over its logits, the loss's times scale[token * scale_stride].

    A head's gradient has `word_elements` elements of the logits' dtype for each word.
    """
    row = tl.program_id(0)
    token = first_row + row
    memory = (first_ptr, rest_ptr, word_elements, blocks, words)
    results = (loss_ptr, lse_ptr, entropy_ptr, z_loss_ptr)
    start = tl.cast(0, tl.int32)
    before = tl.cast(0, tl.int32)
    size = tl.cast(first_words, tl.int32)
    label = load_label(labels_ptr, token, seq_len, ignore_index, SHIFT)
    if label == ignore_index:
        store_ignored_results(results, prediction_ptr, token)
        for number in range(blocks):
            block_ptr, block_words, width = _find_block(memory, row, number, (start, before, size))
            store_zeros(block_ptr, width, DEPTH, LANES)
            start, before, size = _next_place((start, before, size), block_words, grow_to, grow_from)
        return

    if first_rows is not None:
        wait_for_turn(row, first_rows, words)
    # a label outside the vocabulary makes its own row NaN and touches no other memory
    in_vocab = (label >= 0) & (label < words)
    scale, chain, w_y = factors_of_token(scale_ptr, scale_stride, class_weight_ptr, logit_scale, token, label, in_vocab)
    formula = (bias_ptr, class_weight_ptr, logit_scale, softcap, smoothing)
    lane_highest, lane_total, lane_sum, lane_spread, lane_place = no_words(LANES)
    label_ptr = first_ptr
    for number in range(blocks):
        block_ptr, block_words, width = _find_block(memory, row, number, (start, before, size))
        lanes = (lane_highest, lane_total, lane_sum, lane_spread, lane_place)
        span = (start, block_words, width)
        lane_highest, lane_total, lane_sum, lane_spread, lane_place = add_words(
            lanes, block_ptr, prediction_ptr, span, formula, (ENTROPY, PADDED, DEPTH, LANES)
        )
        if (label >= start) & (label < start + block_words):
            label_ptr = block_ptr + (label - start)
        start, before, size = _next_place((start, before, size), block_words, grow_to, grow_from)
    lanes = (lane_highest, lane_total, lane_sum, lane_spread, lane_place)
    highest, total, z_sum, z_spread, place = finish_words(lanes, prediction_ptr, 0, ENTROPY)
    z_y = label_logit(label_ptr, label, 0, in_vocab, formula)
    z_y = tl.where(in_vocab, z_y, float("nan"))
    if prediction_ptr is not None:
        tl.store(prediction_ptr + token, place.to(tl.int64))
    norm = (highest, tl.log2(total))
    terms = term_weights(w_y, words, smoothing, z_weight, class_weight_ptr, class_weight_sums_ptr)
    entropy = 0.0
    if ENTROPY:
        entropy = entropy_of(norm, total, z_spread)
    store_results(results, token, norm, z_y, z_sum, entropy, terms, TOKEN_SCALING)
    # no thread may overwrite the label's logit before all have read it
    tl.debug_barrier()
    scale = tl.where(in_vocab, scale, float("nan"))
    if TOKEN_SCALING:
        scale *= label_probability(norm, z_y)
    others = (lse_grad_ptr, entropy_grad_ptr, token, chain, entropy)
    start = tl.cast(0, tl.int32)
    before = tl.cast(0, tl.int32)
    size = tl.cast(first_words, tl.int32)
    for number in range(blocks):
        block_ptr, block_words, width = _find_block(memory, row, number, (start, before, size))
        parts = ((start, block_words, width), formula, terms, scale, norm, others)
        store_words_gradient(block_ptr, block_ptr, parts, (ENTROPY, PADDED, DEPTH, LANES))
        start, before, size = _next_place((start, before, size), block_words, grow_to, grow_from)
    store_label_gradient(label_ptr, ((), formula, terms, scale, norm, others), z_y, in_vocab)


def loss_and_gradient_of_blocks(
    arguments: LossArguments,
    first_CB: Tensor,
    rest: Tensor,
    sizes: tuple[int, ...],
    *,
    growth: tuple[int, int],
    word_elements: int,
    first_row: int,
) -> None:
    """Write the losses of rows that lie in blocks, and the gradient over their logits.

    Args:
        first_CB: the logits of block 0.
        rest: memory of the later blocks, in the logits' dtype, flat.
        sizes: words of each block.
        growth: each block is the one before times growth[0] / growth[1], rounded down to whole rows' alignment, but
            for the last one.
        word_elements: elements of `rest` that belong to one word of the head.
        first_row: token number of the first row.
    """
    words = arguments.words
    is_padded = words % _ALIGNMENT.value != 0
    is_long = is_padded or arguments.has_long_formula
    with on_device(first_CB):
        _split_row_kernel[(first_CB.shape[0],)](
            first_ptr=first_CB,
            rest_ptr=rest,
            word_elements=word_elements,
            first_row=first_row,
            first_words=sizes[0],
            grow_to=growth[0],
            grow_from=growth[1],
            blocks=len(sizes),
            words=words,
            first_rows=waiting_rows(first_CB, words),
            PADDED=is_padded,
            **tile_of_blocks(max(sizes), element_bytes=first_CB.itemsize, is_long=is_long),
            **arguments.for_labels(),
            **arguments.for_results(),
            **arguments.for_gradient(),
        )
