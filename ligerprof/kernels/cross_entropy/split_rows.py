"""The row kernel for rows that lie in several blocks of memory: the fused loss's scratch.

Axes: C tokens (rows), B words of one block.

As in `rows`, one program per row: it reads the row twice, the second time from the L2 cache. Block 0 is a tensor
[C, B]. The logits of each later block lie in the memory of the head's gradient, in the rows of the words of the block
before: see `chunks._Scratch`. Blocks of a row have one size, or each is larger than the one before by the same factor;
the last one has the rest. Rows in blocks of one size may be read in pairs of words, as in `rows`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl
from torch import Tensor

from ligerprof.kernels.cross_entropy.arguments import LossArguments
from ligerprof.kernels.cross_entropy.formulas import (
    add_words,
    entropy_of,
    finish_words,
    label_logit,
    label_probability,
    load_label,
    no_words,
    store_ignored_results,
    store_label_gradient,
    store_results,
    store_words_gradient,
    store_zeros,
    term_weights,
)
from ligerprof.kernels.cross_entropy.pairs import (
    UNIT,
    finish_pairs,
    load_first_tile,
    read_pairs,
    store_pairs_gradient,
    wait_for_turn,
    word_pointer,
)
from ligerprof.kernels.cross_entropy.rows import config_of_pairs, first_rows, is_paired, tile_of_blocks
from ligerprof.kernels.device import on_device

# rows of blocks start at multiples of this
_ALIGNMENT = tl.constexpr(16)


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
        "distance",
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
    distance,
    SHIFT: tl.constexpr,
    TOKEN_SCALING: tl.constexpr,
    ENTROPY: tl.constexpr,
    PAIRED: tl.constexpr,
    PADDED: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
):
    """One row: its results, and the gradient over its logits, the loss's times scale[token * scale_stride].

    A head's gradient has `word_elements` elements of the logits' dtype for each word. For PAIRED rows, blocks have one
    size, and `rest` begins `distance` times 16 elements after `first`.
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
        store_ignored_results(results, token)
        if prediction_ptr is not None:
            tl.store(prediction_ptr + token, -1)
        for number in range(blocks):
            block_ptr, block_words, width = _find_block(memory, row, number, (start, before, size))
            store_zeros(block_ptr, width, DEPTH, LANES)
            start, before, size = _next_place((start, before, size), block_words, grow_to, grow_from)
        return

    if first_rows is not None:
        wait_for_turn(row, first_rows, words)
    # a label outside the vocabulary makes its own row NaN and touches no other memory
    in_vocab = (label >= 0) & (label < words)
    scale = 1.0 if logit_scale is None else tl.cast(logit_scale, tl.float32)
    chain = scale
    if scale_ptr is not None:
        scale *= tl.load(scale_ptr + token.to(tl.int64) * scale_stride).to(tl.float32)
    w_y = 1.0
    if class_weight_ptr is not None:
        w_y = tl.load(class_weight_ptr + label, mask=in_vocab, other=0.0).to(tl.float32)

    formula = (bias_ptr, class_weight_ptr, logit_scale, softcap, smoothing)
    if PAIRED:
        row_blocks = (size, blocks, words, row, word_elements, distance)
        row_memory = (first_ptr, row_blocks)
        label_ptr = word_pointer(row_memory, tl.where(in_vocab, label, 0))
        z_y = label_logit(label_ptr, label, 0, in_vocab, formula)
        read = read_pairs(row_memory, words, formula, first_rows is not None, DEPTH, LANES)
        first_tile = load_first_tile(row_memory, words, DEPTH, LANES)
        highest, total = finish_pairs(read)
        z_sum, z_spread = 0.0, 0.0
    else:
        lane_highest, lane_total, lane_sum, lane_spread, lane_place = no_words(LANES)
        label_ptr = first_ptr
        for number in range(blocks):
            block_ptr, block_words, width = _find_block(memory, row, number, (start, before, size))
            lanes = (lane_highest, lane_total, lane_sum, lane_spread, lane_place)
            span = (start, block_words, width)
            lane_highest, lane_total, lane_sum, lane_spread, lane_place = add_words(
                lanes, block_ptr, prediction_ptr, span, formula, ENTROPY, PADDED, DEPTH, LANES
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
    if PAIRED:
        store_pairs_gradient(
            first_tile, row_memory, first_ptr, words, formula, terms, scale, norm, others, DEPTH, LANES
        )
    else:
        start = tl.cast(0, tl.int32)
        before = tl.cast(0, tl.int32)
        size = tl.cast(first_words, tl.int32)
        for number in range(blocks):
            block_ptr, block_words, width = _find_block(memory, row, number, (start, before, size))
            span = (start, block_words, width)
            store_words_gradient(block_ptr, block_ptr, span, formula, terms, scale, norm, others, PADDED, DEPTH, LANES)
            start, before, size = _next_place((start, before, size), block_words, grow_to, grow_from)
    store_label_gradient(label_ptr, formula, terms, scale, norm, z_y, in_vocab, others)


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
    config, distance = None, 0
    if growth[0] == growth[1] and is_paired(arguments, (first_CB, rest), (sizes[0], words, word_elements)):
        distance, odd_bytes = divmod(rest.data_ptr() - first_CB.data_ptr(), UNIT.value * first_CB.itemsize)
        config = None if odd_bytes else config_of_pairs(sizes)
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
            first_rows=first_rows(first_CB) if config else None,
            distance=distance,
            PAIRED=config is not None,
            PADDED=is_padded,
            **(config or tile_of_blocks(max(sizes), element_bytes=first_CB.itemsize, is_long=is_long)),
            **arguments.for_labels(),
            **arguments.for_results(),
            **arguments.for_gradient(),
        )
