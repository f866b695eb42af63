"""Decide how many tokens the fused loss processes at a time; the kernel and the estimate share this plan.

Next to as few blocks of one size as possible, this saves 2.1 % of a fused loss at 2048 x 2048 x 128256 on an H200, 1 %
at 4096 x 2048, and 0.5 % at three larger shapes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from ligerprof.errors import RecipeError
from ligerprof.kernels.cross_entropy.spec import statistics_bytes
from ligerprof.kernels.sizes import ceil_div, round_up
from ligerprof.torch_memory.dtypes import FP32_BYTES
from ligerprof.units import MIB, format_bytes

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


# 256 MiB beyond the gradients, less what the allocator does not split of the blocks of workspace and gradients (up to 1
# MiB each) and the losses; slightly more than one chunk of 1024 tokens of a 128256-word vocabulary in 16 bit
BALANCED_BYTES = 254 * MIB

# tiles of cuBLAS products: part of the last tile is idle unless a chunk is a multiple
_TILE_TOKENS = 128
_SMALL_TILE_TOKENS = 16

# from this chunk size on, accumulating into the head's gradient costs less than computing the logits twice (measured
# at 2048 and 4096 hidden elements)
_WORTHWHILE_TOKENS = 384

# words per block, at least, of logits that are computed again: smaller products leave part of a GPU idle. Larger
# blocks hold fewer tokens, and the head's gradient is read and written for each group of tokens
_RECOMPUTED_WORDS = 16384


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkPlan:
    """How one fused loss lays out its logits in memory.

    The logits of the first `scratch_tokens` lie in the memory of the head's gradient, which is written last; see the
    picture in `chunks._Scratch`. The other tokens go through the workspace chunk by chunk. Small chunks would read and
    write the head's gradient too often: if `recomputed`, chunks of the other tokens lie in that memory first, for their
    losses and the hidden states' gradient, and their logits are computed again for the head's gradient.

    Attributes:
        scratch_tokens: 0 if there is no scratch.
        blocks: vocabulary words of each block of the scratch; empty without scratch.
        chunk_tokens: tokens per chunk, the last chunk may hold fewer; 0 if the scratch takes all tokens.
        chunks: number of chunks of the other tokens.
        row_elements: stride between rows of a chunk's logits.
        workspace_bytes: size of the buffer that holds a chunk's logits, or block 0 and, if `recomputed`, statistics.
    """

    scratch_tokens: int
    blocks: tuple[int, ...]
    chunk_tokens: int
    chunks: int
    recomputed: bool
    row_elements: int
    workspace_bytes: int

    @property
    def block_elements(self) -> int:
        """Elements of the workspace that hold the logits of block 0, or of a block that is computed again."""
        return self.scratch_tokens * aligned(self.blocks[0]) if self.blocks else 0

    def growth(self, row_tokens: int) -> tuple[int, int]:
        """The factor between the sizes of two blocks, but for the last one, as a numerator and a denominator.

        Args:
            row_tokens: tokens whose logits for a block fit into the block's rows of the head's gradient.
        """
        equal = len(set(self.blocks[:-1])) <= 1
        return (1, 1) if equal else (row_tokens, self.scratch_tokens)

    @property
    def recomputed_tokens(self) -> int:
        """How many tokens' logits are computed again at a time."""
        return max(_whole_tiles(self.block_elements // _RECOMPUTED_WORDS), self.chunk_tokens)

    def recomputed_words(self, tokens: int) -> int:
        """Words per block, of logits of this many tokens that are computed again."""
        return self.block_elements // tokens // ROW_ALIGNMENT_ELEMENTS * ROW_ALIGNMENT_ELEMENTS


def plan_chunks(  # noqa: PLR0913 - sizes and what is wanted, all by name
    *,
    tokens: int,
    hidden: int,
    vocab: int,
    element_bytes: int,
    budget: str | int,
    gradient_bytes: int = 0,
    entropy: bool = False,
) -> ChunkPlan:
    """Choose chunks for a budget.

    Args:
        tokens: rows of the hidden states.
        element_bytes: bytes per stored logit (2 or 4).
        budget: `lean` (no more than liger-kernel's chunk), `balanced` (`BALANCED_BYTES`), or bytes.
        gradient_bytes: bytes per element of the head's gradient; 0 if it is not wanted.
        entropy: whether entropies are computed, for which tokens in the scratch have one more statistic.

    Raises:
        RecipeError: the budget is an unknown word, or smaller than the smallest chunk.
    """
    row_elements = aligned(vocab)
    row_bytes = row_elements * element_bytes
    if budget == "lean":
        largest = lean_chunk_tokens(tokens=tokens, hidden=hidden, vocab=vocab)
        budget_bytes = largest * row_bytes
    elif isinstance(budget, str) and budget != "balanced":
        raise RecipeError(f"unknown flce budget {budget!r}. Known: lean, balanced, or a number of bytes.")
    else:
        budget_bytes = BALANCED_BYTES if isinstance(budget, str) else budget
        largest = _tokens_within(budget_bytes, row_bytes, tokens)
    # tokens whose logits for some words fit into those words' rows of the head's gradient
    row_tokens = hidden * gradient_bytes // element_bytes
    # of the last block, per token: in their rows the hidden states' gradient is summed in fp32
    sum_words = ceil_div(FP32_BYTES, gradient_bytes) if gradient_bytes else 0
    all_statistics_bytes = tokens * statistics_bytes(entropy=entropy)

    def is_recomputed(scratch_tokens: int) -> bool:
        return largest < min(tokens - scratch_tokens, _WORTHWHILE_TOKENS)

    def blocks_of(scratch_tokens: int) -> tuple[int, ...]:
        kept_bytes = all_statistics_bytes if is_recomputed(scratch_tokens) else 0
        return split_words(
            (budget_bytes - kept_bytes) // element_bytes // scratch_tokens,
            tokens=scratch_tokens,
            hidden=hidden,
            row_tokens=row_tokens,
            vocab=vocab,
            last_words=scratch_tokens * sum_words,
        )

    scratch_tokens, blocks = _plan_scratch(min(tokens, row_tokens), largest, blocks_of)
    others = tokens - scratch_tokens
    recomputed = scratch_tokens > 0 and is_recomputed(scratch_tokens)
    if recomputed:
        largest = min(scratch_tokens, vocab * row_tokens // row_elements)
    chunk_tokens = _equal_chunks(others, largest)
    chunk_bytes = 0 if recomputed else chunk_tokens * row_bytes
    scratch_bytes = aligned(blocks[0]) * scratch_tokens * element_bytes if blocks else 0
    if recomputed:
        scratch_bytes += all_statistics_bytes
    return ChunkPlan(
        scratch_tokens=scratch_tokens,
        blocks=blocks,
        chunk_tokens=chunk_tokens,
        chunks=ceil_div(others, chunk_tokens) if others else 0,
        recomputed=recomputed,
        row_elements=row_elements,
        workspace_bytes=max(chunk_bytes, scratch_bytes),
    )


def _plan_scratch(
    most: int, largest_chunk: int, blocks_of: Callable[[int], tuple[int, ...]]
) -> tuple[int, tuple[int, ...]]:
    """As many tokens as the memory of the head's gradient holds, if that is more than a chunk, and their blocks."""
    for tokens in range(_whole_tiles(most), largest_chunk, -_tile_tokens(most)):
        blocks = blocks_of(tokens)
        if blocks:
            return tokens, blocks
    return 0, ()


def lean_chunk_tokens(*, tokens: int, hidden: int, vocab: int) -> int:
    """Tokens of liger-kernel 0.8.5's chunk: the power of two that makes logits about as large as hidden states."""
    growth = ceil_div(vocab, hidden)
    share = ceil_div(tokens, growth)
    return min(1 << (share - 1).bit_length(), tokens)


def _tokens_within(budget_bytes: int, row_bytes: int, tokens: int) -> int:
    fitting = budget_bytes // row_bytes
    if fitting >= tokens:
        return tokens
    smallest = min(tokens, _SMALL_TILE_TOKENS)
    if fitting < smallest:
        raise RecipeError(
            f"an flce budget of {format_bytes(budget_bytes)} is too small: {smallest} tokens of logits take"
            f" {format_bytes(smallest * row_bytes)}. Give at least that."
        )
    return fitting


def _equal_chunks(tokens: int, largest: int) -> int:
    """Tokens per chunk of an even split into as few chunks of whole tiles as `largest` allows.

    Small tiles are chosen only if they save a chunk: part of a tile being idle costs less than one more reading and
    writing of the head's gradient.
    """
    if largest >= tokens:
        return tokens
    smallest = min(_tile_tokens(largest), _SMALL_TILE_TOKENS)
    share = ceil_div(tokens, ceil_div(tokens, largest // smallest * smallest))
    size = round_up(share, _tile_tokens(largest))
    return size if size <= largest else round_up(share, smallest)


def _tile_tokens(tokens: int) -> int:
    fitting = (tile for tile in (_TILE_TOKENS, _SMALL_TILE_TOKENS) if tile <= tokens)
    return next(fitting, 1)


def _whole_tiles(tokens: int) -> int:
    tile = _tile_tokens(tokens)
    return tokens // tile * tile
