"""Split the vocabulary into the scratch's blocks, so that products fill a GPU; torch is not imported.

Next to as few blocks of one size as possible, this saves 2.1 % of a fused loss at 2048 x 2048 x 128256 on an H200, 1 %
at 4096 x 2048, and 0.5 % at three larger shapes.
"""

from collections.abc import Iterator
from functools import lru_cache

from ligerprof.kernels.sizes import ceil_div, round_up

# Triton infers aligned rows from a stride that is a multiple of 16; cuBLAS's fast kernels need 16 bytes
ROW_ALIGNMENT_ELEMENTS = 16

# on the 132 multiprocessors of an H100 or H200, cuBLAS computes a bf16 product in waves of 66 pairs of tiles. A pair
# has one of these shapes, with which times per element are the same within 1 % (benchmarks/NOTES.md). Nothing tells
# which one cuBLAS takes; the one with the fewest elements is assumed
_PAIRS_PER_WAVE = 66
_PAIRS = ((256, 256), (320, 256), (256, 320), (384, 192), (192, 384))
_TILE_WORDS = 128
# adding a block's product to the hidden states' gradient takes as long on an H200 as so many multiply-adds of a bf16
# product, per element of that gradient (benchmarks/NOTES.md)
_BLOCK_PRODUCTS = 1500
# wider blocks than this leave half of the row kernel's large tiles idle, which costs narrow vocabularies more than
# whole waves save
_SHORT_WORDS = 16384
_NARROW_VOCAB = 65536


@lru_cache(maxsize=256)
def split_words(
    most_words: int, *, tokens: int, hidden: int, row_tokens: int, vocab: int, last_words: int
) -> tuple[int, ...]:
    """Words of each block: the layout with which products take least time, in whole waves of tiles.

    Blocks have one size, but for the last one, or grow.

    Args:
        most_words: words of the first block, at most; rounded down to a multiple of 16.
        tokens: rows of each block.
        row_tokens: tokens whose logits for a block fit into the block's rows of the head's gradient.
        last_words: words of the last block, at least.

    Returns:
        An empty tuple if the first or the last block is too small.
    """

    def time(blocks: tuple[int, ...]) -> tuple[int, int]:
        logits, head = (sum(_tiles(words, columns) for words in blocks) for columns in (tokens, hidden))
        sums = len(blocks) * tokens * hidden
        return logits * hidden + head * tokens + _BLOCK_PRODUCTS * sums, blocks[0]

    most_words = most_words // ROW_ALIGNMENT_ELEMENTS * ROW_ALIGNMENT_ELEMENTS
    if most_words < 1:
        return ()
    layouts = (*_even(most_words, vocab), *_growing(most_words, tokens, row_tokens, vocab))
    return min((blocks for blocks in layouts if blocks[-1] >= last_words), key=time, default=())


def _tiles(words: int, columns: int) -> int:
    """Elements of the waves of tiles of a product of [words, columns] elements."""

    def elements(high: int, wide: int) -> int:
        pairs = ceil_div(words, high) * ceil_div(columns, wide)
        return round_up(pairs, _PAIRS_PER_WAVE) * high * wide

    return min(elements(*pair) for pair in _PAIRS)


def _even(most_words: int, vocab: int) -> Iterator[tuple[int, ...]]:
    """Blocks of one size, as few as possible."""
    count = ceil_div(vocab, most_words)
    largest = most_words if vocab > _NARROW_VOCAB else min(most_words, _SHORT_WORDS)
    for size in _sizes(aligned(ceil_div(vocab, count)), largest):
        last = vocab - (count - 1) * size
        if last < 1:
            break
        yield (*[size] * (count - 1), last)


def _growing(most_words: int, tokens: int, row_tokens: int, vocab: int) -> Iterator[tuple[int, ...]]:
    """Blocks that grow, if they are fewer than blocks of one size."""
    count = len(_grow(most_words, tokens, row_tokens, vocab))
    if count < ceil_div(vocab, most_words):
        for first in _sizes(_smallest_first(most_words, count, tokens, row_tokens, vocab), most_words):
            yield _grow(first, tokens, row_tokens, vocab)


def _sizes(smallest: int, largest: int) -> Iterator[int]:
    """The smallest size, and all of whole tiles up to the largest."""
    yield smallest
    yield from range(round_up(smallest + 1, _TILE_WORDS), largest + 1, _TILE_WORDS)


def _smallest_first(most_words: int, count: int, tokens: int, row_tokens: int, vocab: int) -> int:
    """Words of the smallest first block with which growing blocks are so few."""
    low, high = 0, most_words // ROW_ALIGNMENT_ELEMENTS
    while high - low > 1:
        middle = (low + high) // 2
        tried = _grow(middle * ROW_ALIGNMENT_ELEMENTS, tokens, row_tokens, vocab, at_most=count)
        low, high = (low, middle) if tried else (middle, high)
    return high * ROW_ALIGNMENT_ELEMENTS


def _grow(words: int, tokens: int, row_tokens: int, vocab: int, at_most: int | None = None) -> tuple[int, ...]:
    """Blocks of words; each has as many as let its logits fit into the rows of the block before.

    Empty if they are more than `at_most`.
    """
    sizes, left = [], vocab
    while left > words:
        sizes.append(words)
        left -= words
        if at_most is not None and len(sizes) >= at_most:
            return ()
        words = words * row_tokens // tokens // ROW_ALIGNMENT_ELEMENTS * ROW_ALIGNMENT_ELEMENTS
    return (*sizes, left)


def aligned(elements: int) -> int:
    """The stride of rows of this many elements."""
    return round_up(elements, ROW_ALIGNMENT_ELEMENTS)
