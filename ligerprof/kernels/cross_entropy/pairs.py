"""Readings of wide rows of bf16 on Hopper GPUs and later: words in pairs of 32 bits, and tiles fetched ahead.

Axes: T threads, P pairs that a thread loads at once.

A shift and a mask unpack a pair of words in fewer instructions and registers than conversions from 16 bits. Logits have
no options but a scale: others have longer formulas, for which the registers do not suffice. See `rows` and `split_rows`
for the kernels. Some arguments come as tuples:

    memory     row_ptr, blocks: where a row's first words are, and None if all others follow
    blocks     words of each block but the last, which has the rest; the number of blocks, and of words of the row; the
               row's number in a block; elements per word in the memory of later blocks, and its distance from row_ptr's
               memory in units of 16 elements
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
WORDS_OF_THREAD = tl.constexpr(8)
_WORD_BYTES = tl.constexpr(2)
# the unit of distances between blocks' memories, in elements
DISTANCE = tl.constexpr(16)
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
def _block_shift(blocks, number):
    """The distance between the words of a block and where they would be if they followed those of block 0."""
    size, count, words, row, word_elements, distance = blocks
    width = tl.where(number == count - 1, words - number * size, size)
    before = (number - 1) * tl.cast(size, tl.int64) * word_elements
    shift = distance.to(tl.int64) * DISTANCE + before + row * tl.cast(width - size, tl.int64)
    shift -= number * tl.cast(size, tl.int64)
    return tl.where(number == 0, 0, shift)


@triton.jit
def word_pointer(memory, word):
    """Where one word of a row is."""
    row_ptr, blocks = memory
    pointer = row_ptr + word
    if blocks is not None:
        pointer += _block_shift(blocks, tl.minimum(word // blocks[0], blocks[1] - 1))
    return pointer


@triton.jit
def _fetch(pointer, fetched_bytes):
    """Ask the L2 cache for bytes, by one thread."""
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
        [pointer.to(tl.int64), fetched_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _fetch_tile(memory, start, words, TILE: tl.constexpr):
    """Ask the L2 cache for the tile from word `start` on, which lies in two blocks at most."""
    _, blocks = memory
    left = tl.minimum(words - start, TILE)
    in_block = left
    if blocks is not None:
        size = blocks[0]
        in_block = tl.minimum(left, size - start % size)
        _fetch(word_pointer(memory, start + in_block), (left - in_block) * _WORD_BYTES)
    _fetch(word_pointer(memory, start), in_block * _WORD_BYTES)


@triton.jit
def _places(WIDTH: tl.constexpr, DEPTH: tl.constexpr, THREADS: tl.constexpr):
    """Places of a tile's elements, of which a thread has WIDTH next to each other: [T, 1, WIDTH] plus [1, DEPTH, 1]."""
    lanes = tl.arange(0, THREADS)[:, None, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    # added to a pointer one after the other, so that depths are constants in the addresses
    depths = tl.arange(0, DEPTH)[None, :, None] * (THREADS * WIDTH)
    return lanes, depths


@triton.jit
def _tile_shift(blocks, start, lanes, depths, WORDS: tl.constexpr):
    """`_block_shift` of the tile from word `start` on, in elements of WORDS words; it lies in two blocks at most."""
    size, count = blocks[0], blocks[1]
    # in the interpreter, which would divide a constant by a tensor, it is no tensor yet
    start = tl.cast(start, tl.int32)
    number = tl.minimum(start // size, count - 1)
    near = _block_shift(blocks, number) // WORDS
    far = _block_shift(blocks, tl.minimum(number + 1, count - 1)) // WORDS
    border = ((number + 1) * size - start) // WORDS
    # not where(near, far) of pointers: their alignment must remain known
    return tl.where(lanes < border - depths, tl.multiple_of(near, 8), tl.multiple_of(far, 8))


@triton.jit
def load_tile(memory, start, words, DEPTH: tl.constexpr, THREADS: tl.constexpr, POLICY: tl.constexpr):
    """Pairs from the given one on, [T, DEPTH, P]; words of -inf beyond the row."""
    row_ptr, blocks = memory
    lanes, depths = _places(_PAIRS, DEPTH, THREADS)
    inside = lanes < words // 2 - start - depths
    tile_ptr = row_ptr.to(tl.pointer_type(tl.int32)) + start
    if blocks is not None:
        tile_ptr += _tile_shift(blocks, 2 * start, lanes, depths, 2)
    return tl.load(tile_ptr + lanes + depths, mask=inside, other=_NO_PAIR, eviction_policy=POLICY)


@triton.jit
def _words_of(pairs, formula):
    """The two words of each pair as the loss sees them, in fp32."""
    first = (pairs << 16).to(tl.float32, bitcast=True)
    second = (pairs & -65536).to(tl.float32, bitcast=True)
    return scaled_logits(first, None, None, formula), scaled_logits(second, None, None, formula)


@triton.jit
def read_pairs(memory, words, formula, FETCHES: tl.constexpr, DEPTH: tl.constexpr, THREADS: tl.constexpr):
    """Each thread's highest logit, and sum of exponentials relative to it."""
    highest = tl.full([THREADS], LOWEST, tl.float32)
    total = tl.zeros([THREADS], tl.float32)
    tile = load_tile(memory, 0, words, DEPTH, THREADS, "evict_last")
    TILE: tl.constexpr = tile.numel
    for start in range(0, words // 2, TILE):
        if FETCHES:
            _fetch_tile(memory, 2 * (start + _AHEAD * TILE), words, 2 * TILE)
        first, second = _words_of(tile, formula)
        new_highest = tl.maximum(highest, tl.max(tl.max(tl.maximum(first, second), 2), 1))
        norm = (new_highest[:, None, None], 0.0)
        powers = tl.exp2(exponent(first, norm, tl.bfloat16)) + tl.exp2(exponent(second, norm, tl.bfloat16))
        total = total * relative_exp(highest, new_highest) + tl.sum(tl.sum(powers, 2), 1)
        highest = new_highest
        tile = load_tile(memory, start + TILE, words, DEPTH, THREADS, "evict_last")
    return highest, total


@triton.jit
def finish_pairs(lanes):
    """Reduce the threads' results: the highest logit, and the sum of exponentials relative to it."""
    return tl.reduce(lanes, 0, merged_totals)


@triton.jit
def store_pairs_gradient(
    tile,
    memory,
    grad_memory,
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
    grad_ptr, blocks = grad_memory
    lanes, depths = _places(WORDS_OF_THREAD, DEPTH, THREADS)
    for start in range(0, words // 2, TILE):
        first, second = _words_of(tile, formula)
        first = gradient(first, norm, of_softmax, None, None, 0.0, None, tl.bfloat16)
        second = gradient(second, norm, of_softmax, None, None, 0.0, None, tl.bfloat16)
        grad = tl.reshape(tl.join(first, second).to(tl.bfloat16), (THREADS, DEPTH, WORDS_OF_THREAD))
        inside = lanes < words - 2 * start - depths
        tile_ptr = grad_ptr + 2 * start
        if blocks is not None:
            tile_ptr += _tile_shift(blocks, 2 * start, lanes, depths, 1)
        tl.store(tile_ptr + lanes + depths, grad, mask=inside, eviction_policy="evict_first")
        tile = load_tile(memory, start + TILE, words, DEPTH, THREADS, "evict_first")
