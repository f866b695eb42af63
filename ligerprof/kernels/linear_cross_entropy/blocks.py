"""Split the vocabulary into the scratch's blocks, so that products and row kernel fill a GPU; torch is not imported."""

from collections.abc import Iterator

from ligerprof.kernels.cross_entropy.tiles import PAIRS_TILE_WORDS

# Triton infers aligned rows from a stride that is a multiple of 16; cuBLAS's fast kernels need 16 bytes
ROW_ALIGNMENT_ELEMENTS = 16

# cuBLAS computes tiles of 128 x 256 elements of a bf16 product, one per multiprocessor at a time: on an H100 or H200 a
# product takes whole waves of 132 tiles. Either side of a tile may lie along the vocabulary
_MULTIPROCESSORS = 132
_TILES = ((128, 256), (256, 128))
_TILE_WORDS = 128


def split_words(
    most_words: int, *, tokens: int, hidden: int, row_tokens: int, vocab: int, last_words: int
) -> tuple[int, ...]:
    """Words of each block.

    Blocks are few, since each adds its product to the hidden states' gradient, and fill tiles of the row kernel. Of the
    layouts that are equally good at that, the one with the fewest waves of the logits' and the head's gradient's
    products is chosen, then the one with the smallest first block. Blocks have one size, but for the last one, unless
    growing ones are fewer.

    Args:
        most_words: words of the first block, at most; it has a multiple of 16.
        tokens: rows of each block.
        row_tokens: tokens whose logits for a block fit into the block's rows of the head's gradient.
        last_words: words of the last block, at least.

    Returns:
        An empty tuple if the first or the last block is too small.
    """

    def cost(blocks: tuple[int, ...]) -> tuple[int, int, int]:
        # rows in growing blocks are not read in pairs
        tiles = sum(-(-words // PAIRS_TILE_WORDS) for words in blocks) if len(set(blocks[:-1])) <= 1 else 0
        logits, head = (sum(_waves(words, columns) for words in blocks) for columns in (tokens, hidden))
        return len(blocks) + tiles, logits * hidden + head * tokens, blocks[0]

    most_words = most_words // ROW_ALIGNMENT_ELEMENTS * ROW_ALIGNMENT_ELEMENTS
    if most_words < 1:
        return ()
    return min(_layouts(most_words, tokens, row_tokens, vocab, last_words), key=cost, default=())


def _waves(words: int, columns: int) -> int:
    """Waves of a product of [words, columns] elements, with tiles either way."""
    tiles = (-(-words // high) * -(-columns // wide) for high, wide in _TILES)
    return sum(-(-count // _MULTIPROCESSORS) for count in tiles)


def _layouts(most_words: int, tokens: int, row_tokens: int, vocab: int, last_words: int) -> Iterator[tuple[int, ...]]:
    fewest = -(-vocab // most_words)
    growing = len(_grow(most_words, tokens, row_tokens, vocab))
    if growing < fewest:
        for first in _sizes(_smallest_first(most_words, growing, tokens, row_tokens, vocab), most_words):
            blocks = _grow(first, tokens, row_tokens, vocab)
            if blocks[-1] >= last_words:
                yield blocks
        return
    for count in range(fewest, max(fewest, -(-vocab // PAIRS_TILE_WORDS)) + 1):
        for size in _sizes(aligned(-(-vocab // count)), most_words):
            last = vocab - (count - 1) * size
            if last < max(last_words, 1):
                break
            yield (*[size] * (count - 1), last)


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


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is no smaller."""
    return -(-value // multiple) * multiple
