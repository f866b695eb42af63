"""Readings of wide rows of bf16 on Hopper GPUs and later: words in pairs of 32 bits, and tiles fetched ahead.

Axes: T threads, P pairs that a thread loads at once.

A shift and a mask unpack a pair of words in fewer instructions and registers than conversions from 16 bits. Logits have
no options but a scale: others have longer formulas, for which the registers do not suffice. See `rows` for the kernel.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from ligerprof.kernels.cross_entropy.formulas import (
    LOWEST,
    exponent,
    gradient,
    merged_totals,
    relative_exp,
    scaled_logits,
    softmax_factor,
)

# pairs that a thread loads at once
_PAIRS = tl.constexpr(4)
_PAIR_BYTES = tl.constexpr(4)
# two words of -inf
_NO_PAIR = tl.constexpr(-8323200)
# tiles between the one that is computed and the one that is fetched into the L2 cache
_AHEAD = tl.constexpr(2)
# programs that start together wait for up to three quarters of the time in which a row's bytes are read and written
_WAITS = tl.constexpr(4)
# a quarter of that time is a nanosecond for this many words, on an H200
_WORDS_PER_NANOSECOND = tl.constexpr(32)


@triton.jit
def wait_for_turn(row, first_rows, words):
    """Delay the first row of most multiprocessors.

    Otherwise all programs read a row from memory at the same time, and then all read it again from the L2 cache, while
    memory is idle.
    """
    nanoseconds = tl.where(row < first_rows, row % _WAITS * (words // _WORDS_PER_NANOSECOND), 0)
    started = globaltimer()
    now = started
    while now - started < nanoseconds:
        now = globaltimer()


@triton.jit
def _fetch_tile(row_ptr, start, pairs, TILE: tl.constexpr):
    """Ask the L2 cache for the tile from pair `start` on, by one thread."""
    fetched_bytes = tl.minimum(pairs - start, TILE) * _PAIR_BYTES
    tl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        setp.gt.and.s32 first, $2, 0, first;
        @first cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [(row_ptr + start).to(tl.int64), fetched_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _places(WIDTH: tl.constexpr, DEPTH: tl.constexpr, THREADS: tl.constexpr):
    """Places of a tile's elements, of which a thread has WIDTH next to each other: [T, 1, WIDTH] plus [1, DEPTH, 1]."""
    lanes = tl.arange(0, THREADS)[:, None, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    # added to a pointer one after the other, so that depths are constants in the addresses
    depths = tl.arange(0, DEPTH)[None, :, None] * (THREADS * WIDTH)
    return lanes, depths


@triton.jit
def load_tile(logits_ptr, start, words, DEPTH: tl.constexpr, THREADS: tl.constexpr, POLICY: tl.constexpr):
    """Pairs from the given one on, [T, DEPTH, P]; words of -inf beyond the row."""
    lanes, depths = _places(_PAIRS, DEPTH, THREADS)
    inside = lanes < words // 2 - start - depths
    row_ptr = logits_ptr.to(tl.pointer_type(tl.int32)) + start
    return tl.load(row_ptr + lanes + depths, mask=inside, other=_NO_PAIR, eviction_policy=POLICY)


@triton.jit
def _words_of(pairs, formula):
    """The two words of each pair as the loss sees them, in fp32."""
    first = (pairs << 16).to(tl.float32, bitcast=True)
    second = (pairs & -65536).to(tl.float32, bitcast=True)
    return scaled_logits(first, None, None, formula), scaled_logits(second, None, None, formula)


@triton.jit
def read_pairs(logits_ptr, words, formula, FETCHES: tl.constexpr, DEPTH: tl.constexpr, THREADS: tl.constexpr):
    """Each thread's highest logit, and sum of exponentials relative to it."""
    highest = tl.full([THREADS], LOWEST, tl.float32)
    total = tl.zeros([THREADS], tl.float32)
    tile = load_tile(logits_ptr, 0, words, DEPTH, THREADS, "evict_last")
    TILE: tl.constexpr = tile.numel
    for start in range(0, words // 2, TILE):
        if FETCHES:
            _fetch_tile(logits_ptr.to(tl.pointer_type(tl.int32)), start + _AHEAD * TILE, words // 2, TILE)
        first, second = _words_of(tile, formula)
        new_highest = tl.maximum(highest, tl.max(tl.max(tl.maximum(first, second), 2), 1))
        norm = (new_highest[:, None, None], 0.0)
        powers = tl.exp2(exponent(first, norm, tl.bfloat16)) + tl.exp2(exponent(second, norm, tl.bfloat16))
        total = total * relative_exp(highest, new_highest) + tl.sum(tl.sum(powers, 2), 1)
        highest = new_highest
        tile = load_tile(logits_ptr, start + TILE, words, DEPTH, THREADS, "evict_last")
    return highest, total


@triton.jit
def finish_pairs(lanes):
    """Reduce the threads' results: the highest logit, and the sum of exponentials relative to it."""
    return tl.reduce(lanes, 0, merged_totals)


@triton.jit
def store_pairs_gradient(
    tile,
    logits_ptr,
    grad_ptr,
    words,
    formula,
    terms,
    z_weight,
    scale,
    norm,
    others,
    DEPTH: tl.constexpr,
    THREADS: tl.constexpr,
):
    """What `store_words_gradient` does, for a row whose first tile is loaded."""
    TILE: tl.constexpr = tile.numel
    of_softmax = softmax_factor(terms, z_weight, scale, norm, others)
    lanes, depths = _places(2 * _PAIRS, DEPTH, THREADS)
    for start in range(0, words // 2, TILE):
        first, second = _words_of(tile, formula)
        first = gradient(first, norm, of_softmax, None, None, 0.0, None, tl.bfloat16)
        second = gradient(second, norm, of_softmax, None, None, 0.0, None, tl.bfloat16)
        grad = tl.reshape(tl.join(first, second).to(tl.bfloat16), (THREADS, DEPTH, 2 * _PAIRS))
        inside = lanes < words - 2 * start - depths
        tl.store(grad_ptr + 2 * start + lanes + depths, grad, mask=inside, eviction_policy="evict_first")
        tile = load_tile(logits_ptr, start + TILE, words, DEPTH, THREADS, "evict_first")
