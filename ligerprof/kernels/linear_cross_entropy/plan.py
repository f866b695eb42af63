"""Decide how many tokens the fused loss processes at a time; the kernel and the estimate share this plan."""

from dataclasses import dataclass

from ligerprof.errors import RecipeError
from ligerprof.kernels.cross_entropy.statistics import statistics_bytes
from ligerprof.torch_memory.dtypes import FP32_BYTES
from ligerprof.units import MIB, format_bytes

# slightly more than one chunk of 1024 tokens of a 128256-word vocabulary in 16 bit
BALANCED_BYTES = 256 * MIB

# tiles of cuBLAS products: part of the last tile is idle unless a chunk is a multiple
_TILE_TOKENS = 128
_SMALL_TILE_TOKENS = 16

# Triton infers aligned rows from a stride that is a multiple of 16; cuBLAS's fast kernels need 16 bytes
_ROW_ALIGNMENT_ELEMENTS = 16

# from this chunk size on, accumulating into the head's gradient costs less than computing the logits twice (measured
# at 2048 and 4096 hidden elements)
_WORTHWHILE_TOKENS = 384


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkPlan:
    """How one fused loss lays out its logits in memory.

    The logits of the first `scratch_tokens` lie in the memory of the head's gradient, which is written last; see the
    picture in `chunks._Scratch`. The other tokens go through the workspace chunk by chunk. Small chunks would read and
    write the head's gradient too often: if `recomputed`, the other tokens go through the scratch first, for their
    losses and the hidden states' gradient, and their logits are computed again for the head's gradient.

    Attributes:
        scratch_tokens: 0 if there is no scratch.
        block_words: vocabulary words of a block, the last block may hold fewer; 0 without scratch.
        chunk_tokens: tokens per chunk, the last chunk may hold fewer; 0 if the scratch takes all tokens.
        chunks: number of chunks of the other tokens.
        row_elements: stride between rows of a chunk's logits.
        workspace_bytes: size of the buffer that holds a chunk's logits, or block 0 and all statistics.
    """

    scratch_tokens: int
    block_words: int
    chunk_tokens: int
    chunks: int
    recomputed: bool
    row_elements: int
    workspace_bytes: int


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
        budget: `lean` (no more than liger-kernel's chunk), `balanced` (256 MiB), or bytes.
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
    most = min(tokens, hidden * gradient_bytes // element_bytes)
    all_statistics_bytes = tokens * statistics_bytes(entropy=entropy)
    budget_bytes -= all_statistics_bytes
    scratch = _plan_scratch(most, largest, vocab, element_bytes, budget_bytes, gradient_bytes)
    others = tokens - scratch.tokens
    recomputed = scratch.tokens > 0 and largest < min(others, _WORTHWHILE_TOKENS)
    chunk_tokens = _equal_chunks(others, scratch.tokens if recomputed else largest)
    chunk_bytes = 0 if recomputed else chunk_tokens * row_bytes
    scratch_bytes = scratch.workspace_bytes + all_statistics_bytes if scratch.tokens else 0
    return ChunkPlan(
        scratch_tokens=scratch.tokens,
        block_words=scratch.block_words,
        chunk_tokens=chunk_tokens,
        chunks=-(-others // chunk_tokens) if others else 0,
        recomputed=recomputed,
        row_elements=row_elements,
        workspace_bytes=max(chunk_bytes, scratch_bytes),
    )


@dataclass(frozen=True, slots=True)
class _ScratchPlan:
    tokens: int = 0
    block_words: int = 0
    workspace_bytes: int = 0


def _plan_scratch(
    most: int, largest_chunk: int, vocab: int, element_bytes: int, budget_bytes: int, gradient_bytes: int
) -> _ScratchPlan:
    """As many tokens as the memory of the head's gradient holds, if that is more than a chunk.

    The hidden states' gradient is summed in fp32 in the rows of the last block, which limits the tokens too.
    """
    for tokens in range(_whole_tiles(most), largest_chunk, -_tile_tokens(most)):
        room = budget_bytes // (tokens * element_bytes)
        most_words = room // _ROW_ALIGNMENT_ELEMENTS * _ROW_ALIGNMENT_ELEMENTS
        if most_words < 1:
            continue
        words = aligned(-(-vocab // -(-vocab // most_words)))
        last_words = vocab - (-(-vocab // words) - 1) * words
        if last_words * gradient_bytes >= tokens * FP32_BYTES:
            return _ScratchPlan(tokens, words, words * tokens * element_bytes)
    return _ScratchPlan()


def aligned(elements: int) -> int:
    """The stride of rows of this many elements."""
    return _round_up(elements, _ROW_ALIGNMENT_ELEMENTS)


def lean_chunk_tokens(*, tokens: int, hidden: int, vocab: int) -> int:
    """Tokens of liger-kernel 0.8.5's chunk: the power of two that makes logits about as large as hidden states."""
    growth = -(-vocab // hidden)
    share = -(-tokens // growth)
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
    """Tokens per chunk of an even split into as few chunks of whole tiles as `largest` allows."""
    if largest >= tokens:
        return tokens
    whole_tiles = _whole_tiles(largest)
    chunks = -(-tokens // whole_tiles)
    return min(_round_up(-(-tokens // chunks), _tile_tokens(largest)), whole_tiles)


def _tile_tokens(tokens: int) -> int:
    fitting = (tile for tile in (_TILE_TOKENS, _SMALL_TILE_TOKENS) if tile <= tokens)
    return next(fitting, 1)


def _whole_tiles(tokens: int) -> int:
    tile = _tile_tokens(tokens)
    return tokens // tile * tile


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
