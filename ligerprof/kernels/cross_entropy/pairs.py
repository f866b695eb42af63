"""Readings of wide rows of bf16 on Hopper GPUs and later: words in pairs of 32 bits, and tiles fetched ahead.

Axes: T threads, P pairs that a thread loads at once.

A shift and a mask unpack a pair of words in fewer instructions and registers than conversions from 16 bits. Logits have
no options but a scale: others have longer formulas, for which the registers do not suffice. See `rows` and `split_rows`
for the kernels. Some arguments come as tuples:

    memory    first_ptr, blocks: where a row begins, and None if all its words follow there
    blocks    words per block, but the last one has the rest; number of blocks; words of the row; the row's number; of
              the memory of later blocks, elements per word, and its distance from first_ptr, where row 0 begins
    place     of a tile: its distance from first_ptr, the number of its block, words from its first one to the block's
              end. Distances are in units of 16 elements, so that the compiler knows how addresses are aligned
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
from ligerprof.kernels.cross_entropy.tiles import WORDS_OF_THREAD

# pairs that a thread loads at once
_PAIRS = tl.constexpr(4)
_WORDS_OF_THREAD = tl.constexpr(WORDS_OF_THREAD)
_WORD_BYTES = tl.constexpr(2)
# of distances, in elements
UNIT = tl.constexpr(16)
# two words of -inf
_NO_PAIR = tl.constexpr(-8323200)
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
def _place_of_block(blocks, number):
    size, count, words, row, word_elements, distance = blocks
    left = tl.where(number == count - 1, words - number * size, size)
    row = row.to(tl.int64)
    later = distance + (number - 1) * word_elements.to(tl.int64) * (size // UNIT) + row * (left // UNIT)
    return tl.where(number == 0, row * (size // UNIT), later), number, tl.where(number < count, left, 0)


@triton.jit
def _first_place(memory, words):
    _, blocks = memory
    distance = tl.cast(0, tl.int64)
    number = tl.cast(0, tl.int32)
    left = tl.cast(words, tl.int32)
    if blocks is not None:
        distance, number, left = _place_of_block(blocks, number)
    return distance, number, left


@triton.jit
def _next_place(memory, place, TILE: tl.constexpr):
    """The place of the tile after this one; no words are left there after the last one."""
    _, blocks = memory
    distance, number, left = place
    distance += TILE // UNIT
    left -= TILE
    if blocks is not None:  # noqa: SIM102 - decided by the compiler
        if left <= 0:
            distance, number, left = _place_of_block(blocks, number + 1)
    return distance, number, left


@triton.jit
def _tiles(memory, words, TILE: tl.constexpr):
    """Tiles of a row: each lies in one block."""
    _, blocks = memory
    tiles = tl.cdiv(words, TILE)
    if blocks is not None:
        size, before_last = blocks[0], blocks[1] - 1
        tiles = before_last * tl.cdiv(size, TILE) + tl.cdiv(words - before_last * size, TILE)
    return tiles


@triton.jit
def word_pointer(memory, word):
    """Where one word of a row is."""
    first_ptr, blocks = memory
    pointer = first_ptr + word
    if blocks is not None:
        number = tl.minimum(word // blocks[0], blocks[1] - 1)
        distance, _, _ = _place_of_block(blocks, number)
        pointer += distance * UNIT - number * blocks[0]
    return pointer


@triton.jit
def _fetch_tile(memory, place, TILE: tl.constexpr):
    """Ask the L2 cache for a tile, by one thread."""
    first_ptr, _ = memory
    distance, _, left = place
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
        [(first_ptr + distance * UNIT).to(tl.int64), tl.minimum(left, TILE) * _WORD_BYTES],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _places(WIDTH: tl.constexpr, DEPTH: tl.constexpr, THREADS: tl.constexpr):
    """Places of a tile's elements, of which a thread has WIDTH next to each other: [1, T * WIDTH] plus [DEPTH, 1].

    Threads and their elements form one dimension. With two, Triton spreads the depths over several threads, which then
    exchange their sums for each tile.
    """
    lanes = tl.arange(0, THREADS * WIDTH)[None, :]
    # added to a pointer one after the other, so that depths are constants in the addresses
    depths = tl.arange(0, DEPTH)[:, None] * (THREADS * WIDTH)
    return lanes, depths


@triton.jit
def _pairs_of_tile(memory, place, DEPTH: tl.constexpr, THREADS: tl.constexpr):
    """Pointers to a tile's pairs [DEPTH, T * P], and their places as two parts of a sum."""
    first_ptr, _ = memory
    distance, _, _ = place
    lanes, depths = _places(_PAIRS, DEPTH, THREADS)
    return (first_ptr + distance * UNIT).to(tl.pointer_type(tl.int32)) + lanes + depths, lanes, depths


@triton.jit
def _load_tile(memory, place, DEPTH: tl.constexpr, THREADS: tl.constexpr):
    """A tile's pairs [DEPTH, T, P]; words of -inf beyond the block's."""
    pairs_ptr, lanes, depths = _pairs_of_tile(memory, place, DEPTH, THREADS)
    _, _, left = place
    # a masked load first sets its registers. A mask computed before the branch would take some throughout the loop
    if left >= THREADS * DEPTH * _WORDS_OF_THREAD:
        pairs = tl.load(pairs_ptr, eviction_policy="evict_last")
    else:
        pairs = tl.load(pairs_ptr, mask=lanes < left // 2 - depths, other=_NO_PAIR, eviction_policy="evict_last")
    return tl.reshape(pairs, (DEPTH, THREADS, _PAIRS))


@triton.jit
def _load_tile_again(memory, place, DEPTH: tl.constexpr, THREADS: tl.constexpr):
    """A tile's pairs [DEPTH, T, P]; what lies beyond the block's words is not defined."""
    pairs_ptr, lanes, depths = _pairs_of_tile(memory, place, DEPTH, THREADS)
    _, _, left = place
    pairs = tl.load(pairs_ptr, mask=lanes < left // 2 - depths, eviction_policy="evict_first")
    return tl.reshape(pairs, (DEPTH, THREADS, _PAIRS))


@triton.jit
def load_first_tile(memory, words, DEPTH: tl.constexpr, THREADS: tl.constexpr):
    """The first pairs of a row that was read once, [DEPTH, T, P]."""
    return _load_tile_again(memory, _first_place(memory, words), DEPTH, THREADS)


@triton.jit
def _words_of(pairs, formula):
    """The two words of each pair as the loss sees them, in fp32."""
    first = (pairs << 16).to(tl.float32, bitcast=True)
    second = (pairs & -65536).to(tl.float32, bitcast=True)
    return scaled_logits(first, None, None, formula), scaled_logits(second, None, None, formula)


@triton.jit
def _higher_words(pairs, others):
    """The higher first words and the higher second words of pairs, in one instruction."""
    return tl.inline_asm_elementwise(
        "max.bf16x2 $0, $1, $2;", "=r,r,r", [pairs, others], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _highest_words(tile, first, second, formula, ON_GPU: tl.constexpr):
    """Each thread's highest logit of a tile, whose pairs have these two words."""
    _, _, logit_scale, _, _ = formula
    if ON_GPU and logit_scale is None:
        highest, other = _words_of(tl.reduce(tl.reduce(tile, 2, _higher_words), 0, _higher_words), formula)
        highest = tl.maximum(highest, other)
    else:
        highest = tl.max(tl.max(tl.maximum(first, second), 2), 0)
    return highest


@triton.jit
def read_pairs(memory, words, formula, ON_GPU: tl.constexpr, DEPTH: tl.constexpr, THREADS: tl.constexpr):
    """Each thread's highest logit, and sum of exponentials relative to it.

    ON_GPU, instead of in the interpreter, tiles are fetched ahead and pairs compared by instructions of the GPU.
    """
    highest = tl.full([THREADS], LOWEST, tl.float32)
    total = tl.zeros([THREADS], tl.float32)
    TILE: tl.constexpr = THREADS * DEPTH * _WORDS_OF_THREAD
    place = _first_place(memory, words)
    tile = _load_tile(memory, place, DEPTH, THREADS)
    place = _next_place(memory, place, TILE)
    if ON_GPU:
        _fetch_tile(memory, place, TILE)
    for _ in range(_tiles(memory, words, TILE)):
        after = _next_place(memory, place, TILE)
        if ON_GPU:
            _fetch_tile(memory, after, TILE)
        first, second = _words_of(tile, formula)
        new_highest = tl.maximum(highest, _highest_words(tile, first, second, formula, ON_GPU))
        norm = (new_highest[None, :, None], 0.0)
        powers = tl.exp2(exponent(first, norm, tl.bfloat16)) + tl.exp2(exponent(second, norm, tl.bfloat16))
        total = total * relative_exp(highest, new_highest) + tl.sum(tl.sum(powers, 2), 0)
        highest = new_highest
        tile = _load_tile(memory, place, DEPTH, THREADS)
        place = after
    return highest, total


@triton.jit
def finish_pairs(lanes):
    """Reduce the threads' results: the highest logit, and the sum of exponentials relative to it."""
    return tl.reduce(lanes, 0, merged_totals)


@triton.jit
def store_pairs_gradient(
    tile,
    memory,
    grad_ptr,
    words,
    formula,
    terms,
    scale,
    norm,
    others,
    DEPTH: tl.constexpr,
    THREADS: tl.constexpr,
):
    """What `store_words_gradient` does, for a row whose first tile is loaded; blocks lie as those of the logits."""
    TILE: tl.constexpr = THREADS * DEPTH * _WORDS_OF_THREAD
    of_softmax = softmax_factor(terms, scale, norm, others)
    lanes, depths = _places(_WORDS_OF_THREAD, DEPTH, THREADS)
    place = _first_place(memory, words)
    for _ in range(_tiles(memory, words, TILE)):
        first, second = _words_of(tile, formula)
        first = gradient(first, norm, of_softmax, None, None, 0.0, None, tl.bfloat16)
        second = gradient(second, norm, of_softmax, None, None, 0.0, None, tl.bfloat16)
        grad = tl.reshape(tl.join(first, second).to(tl.bfloat16), (DEPTH, THREADS * _WORDS_OF_THREAD))
        distance, _, left = place
        tile_ptr = grad_ptr + distance * UNIT
        tl.store(tile_ptr + lanes + depths, grad, mask=lanes < left - depths, eviction_policy="evict_first")
        place = _next_place(memory, place, TILE)
        tile = _load_tile_again(memory, place, DEPTH, THREADS)
