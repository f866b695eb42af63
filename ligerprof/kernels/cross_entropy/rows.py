"""The row kernel of both losses: from logits to each token's results and the gradient of the logits.

Axes: N tokens (rows), V vocabulary.

Labels, results and their gradients are indexed by token number; `logits` and `grad` by row of the launch, which starts
at token `first_row`. See `formulas` for `words`, `width` and arguments that are None. `blocks` has the kernels for rows
whose words come in blocks.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from ligerprof.kernels.cross_entropy.arguments import Arguments, LossArguments
from ligerprof.kernels.cross_entropy.formulas import (
    entropy_of,
    factors_of_token,
    label_logit,
    label_probability,
    load_label,
    reduce_words,
    store_gradient,
    store_ignored_results,
    store_results,
    store_statistics,
    store_zeros,
    term_weights,
)
from ligerprof.kernels.device import is_hopper, on_device, sm_count
from ligerprof.kernels.sizes import ceil_div, next_power_of_2

# launch config of whole rows: one program per row, which it reads twice. A multiprocessor's programs have 8192 lanes in
# all, and their rows 262144 bytes or less, so that the second reading hits the L2 cache; wide loads per thread keep the
# memory busy
_MAX_LANES = 8192
_MIN_LANES = 1024
_ROW_BYTES_PER_LANE = 32
_REGISTERS = 64
_SHORT_LANES = 1024
_LANES_PER_WARP = 256
_MIN_WARPS = 4
# loaded per lane at a time: fewer where long formulas or many addresses take the registers
_BYTES_PER_LANE = 16
_FEWER_BYTES_PER_LANE = 8
# rows in blocks of no more words than this are read by many small programs
_SHORT_WORDS = 16384
# a launch of fewer rows per multiprocessor, or of narrower ones, ends before it has made up for the wait
_ROWS_WORTH_WAITING = 3
_WORDS_WORTH_WAITING = 65536
# programs that start together wait for up to three quarters of the time in which a row's bytes are read and written
_WAITS = tl.constexpr(4)
# a quarter of that time is a nanosecond for this many words, on an H200
_WORDS_PER_NANOSECOND = tl.constexpr(32)


def _depth(args: Arguments) -> int:
    """Elements per lane."""
    optional = ("softcap", "smoothing", "bias_ptr", "prediction_ptr")
    is_long = args["PADDED"] or args["ENTROPY"] or any(args.get(name) is not None for name in optional)
    element_bytes = args["logits_ptr"].element_size()
    # rows that are not aligned are loaded element by element, each with its own address
    is_unaligned = args["logits_stride"] * element_bytes % _BYTES_PER_LANE != 0
    return _elements_per_lane(args["words"], args["LANES"], element_bytes, narrow=is_long or is_unaligned)


def _elements_per_lane(words: int, lanes: int, element_bytes: int, *, narrow: bool) -> int:
    lane_bytes = _FEWER_BYTES_PER_LANE if narrow else _BYTES_PER_LANE
    needed = next_power_of_2(ceil_div(max(words, 1), lanes))
    return int(min(lane_bytes // element_bytes, needed))


def _warps(lanes: int) -> int:
    return max(lanes // _LANES_PER_WARP, _MIN_WARPS)


def tile(max_lanes: int) -> Mapping[str, Callable[[Arguments], Any]]:
    """Heuristics for a program that reads its words in tiles of [DEPTH, LANES]."""
    return {
        "PADDED": lambda args: args["width"] != args["words"],
        "LANES": lambda args: min(max_lanes, next_power_of_2(max(args["words"], 1))),
        "DEPTH": _depth,
        "num_warps": lambda args: _warps(args["LANES"]),
    }


def tile_of_blocks(words: int, *, element_bytes: int, is_long: bool) -> dict[str, int]:
    """The launch config of aligned rows in blocks of up to this many words."""
    # a tile of few elements per thread keeps too little of one row in flight, and the end of each block leaves half a
    # tile idle: rows of short blocks are read by many small programs
    is_short = words <= _SHORT_WORDS
    lanes = min(_SHORT_LANES if is_short else _MAX_LANES, next_power_of_2(max(words, 1)))
    depth = _elements_per_lane(words, lanes, element_bytes, narrow=is_long or is_short)
    return {"LANES": lanes, "DEPTH": depth, "num_warps": _warps(lanes)}


def _lanes_of_row(args: Arguments) -> int:
    words = next_power_of_2(max(args["words"], 1))
    lanes = words * args["logits_ptr"].element_size() // _ROW_BYTES_PER_LANE
    return int(min(max(lanes, _MIN_LANES), _MAX_LANES, words))


@triton.jit
def wait_for_turn(row, first_rows, words):
    """Delay the first row of most multiprocessors.

    Otherwise all programs read a row from memory at the same time, and then all read it again from the L2 cache, while
    memory is idle. On an H200 this saves 1 % of a fused loss and 1 to 7 % of the loss on given logits.
    """
    nanoseconds = tl.where(row < first_rows, row % _WAITS * (words // _WORDS_PER_NANOSECOND), 0)
    started = globaltimer()
    now = started
    while now - started < nanoseconds:
        now = globaltimer()


@triton.heuristics({**tile(_MAX_LANES), "LANES": _lanes_of_row})
@triton.jit(do_not_specialize=["first_row", "seq_len", "ignore_index", "first_rows"])
def _cross_entropy_kernel(
    logits_ptr,
    grad_ptr,
    labels_ptr,
    loss_ptr,
    prediction_ptr,
    lse_ptr,
    entropy_ptr,
    z_loss_ptr,
    statistics_ptr,
    scale_ptr,
    lse_grad_ptr,
    entropy_grad_ptr,
    bias_ptr,
    class_weight_ptr,
    class_weight_sums_ptr,
    logits_stride,
    grad_stride,
    statistics_stride,
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
    first_rows,
    SHIFT: tl.constexpr,
    TOKEN_SCALING: tl.constexpr,
    ENTROPY: tl.constexpr,
    PADDED: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
):
    """One whole row: its results, and their gradient, the loss's times scale[token * scale_stride].

    `grad` may be `logits`. Unless `statistics` is None, it receives what `_block_gradient_kernel` needs. Unless
    `first_rows` is None, so many rows wait for their turn.
    """
    row = tl.program_id(0)
    token = first_row + row
    logits_ptr += row.to(tl.int64) * logits_stride
    if grad_ptr is not None:
        grad_ptr += row.to(tl.int64) * grad_stride
    results = (loss_ptr, lse_ptr, entropy_ptr, z_loss_ptr)
    label = load_label(labels_ptr, token, seq_len, ignore_index, SHIFT)
    if label == ignore_index:
        store_ignored_results(results, prediction_ptr, token)
        if grad_ptr is not None:
            store_zeros(grad_ptr, width, DEPTH, LANES)
        return

    if first_rows is not None:
        wait_for_turn(row, first_rows, words)
    # a label outside the vocabulary makes its own row NaN and touches no other memory
    in_vocab = (label >= 0) & (label < words)
    # loaded here, needed only at the end
    scale, chain, w_y = factors_of_token(scale_ptr, scale_stride, class_weight_ptr, logit_scale, token, label, in_vocab)
    span = (0, words, width)
    formula = (bias_ptr, class_weight_ptr, logit_scale, softcap, smoothing)
    highest, total, z_sum, z_spread, place = reduce_words(
        logits_ptr, prediction_ptr, span, formula, (ENTROPY, PADDED, DEPTH, LANES)
    )
    z_y = label_logit(logits_ptr, label, label, in_vocab, formula)
    z_y = tl.where(in_vocab, z_y, float("nan"))
    if prediction_ptr is not None:
        tl.store(prediction_ptr + token, place.to(tl.int64))
    if statistics_ptr is not None:
        store_statistics(statistics_ptr + row, statistics_stride, (highest, total, z_y, z_sum, z_spread), ENTROPY)
    norm = (highest, tl.log2(total))
    terms = term_weights(w_y, words, smoothing, z_weight, class_weight_ptr, class_weight_sums_ptr)
    entropy = 0.0
    if ENTROPY:
        entropy = entropy_of(norm, total, z_spread)
    store_results(results, token, norm, z_y, z_sum, entropy, terms, TOKEN_SCALING)
    if grad_ptr is not None:
        # no thread may overwrite the label's logit before all have read it
        tl.debug_barrier()
        scale = tl.where(in_vocab, scale, float("nan"))
        if TOKEN_SCALING:
            scale *= label_probability(norm, z_y)
        others = (lse_grad_ptr, entropy_grad_ptr, token, chain, entropy)
        parts = (span, formula, terms, scale, norm, others)
        store_gradient(logits_ptr, grad_ptr, parts, z_y, label, in_vocab, (ENTROPY, PADDED, DEPTH, LANES))


def _register_limit(logits: Tensor) -> Arguments:
    """The option that limits a program's registers, where Triton has it."""
    return {"maxnreg": _REGISTERS} if logits.is_cuda and torch.version.cuda is not None else {}


def waiting_rows(logits_NV: Tensor, words: int) -> int | None:
    """Rows that start together and wait for their turn, on a Hopper GPU or later; None: no row waits."""
    if not logits_NV.is_cuda or words <= _WORDS_WORTH_WAITING or not is_hopper(logits_NV.device):
        return None
    together = sm_count(logits_NV.device)
    return together if logits_NV.shape[0] >= _ROWS_WORTH_WAITING * together else None


def loss_and_gradient(
    arguments: LossArguments,
    logits_NV: Tensor,
    grad_NV: Tensor | None,
    *,
    first_row: int = 0,
    width: int | None = None,
    statistics_SN: Tensor | None = None,
) -> None:
    """Write the losses of whole rows, and the gradient of their logits.

    Args:
        grad_NV: receives the gradient and may be `logits_NV`; None if no gradient is wanted.
        first_row: token number of the first row.
        width: elements per row that may be read and written, if there are more than logits.
        statistics_SN: receives the rows' statistics, with which `blocks.gradient_of_words` writes the gradient again.
    """
    rows, words = logits_NV.shape
    with on_device(logits_NV):
        _cross_entropy_kernel[(rows,)](
            logits_ptr=logits_NV,
            grad_ptr=grad_NV,
            logits_stride=logits_NV.stride(0),
            grad_stride=0 if grad_NV is None else grad_NV.stride(0),
            statistics_ptr=statistics_SN,
            statistics_stride=0 if statistics_SN is None else statistics_SN.stride(0),
            first_row=first_row,
            words=words,
            width=words if width is None else width,
            first_rows=None if grad_NV is None else waiting_rows(logits_NV, words),
            **arguments.for_labels(),
            **arguments.for_results(),
            **arguments.for_gradient(),
            **_register_limit(logits_NV),
        )
