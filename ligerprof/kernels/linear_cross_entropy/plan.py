"""Decide how many tokens the fused loss takes at a time: the one rule for kernel and estimator."""

from dataclasses import dataclass

from ligerprof.errors import RecipeError
from ligerprof.torch_memory.dtypes import FP32_BYTES
from ligerprof.units import MIB, format_bytes

# one chunk of 1024 tokens of a 128256-word vocabulary in 16 bit, and little more
BALANCED_BYTES = 256 * MIB

# tiles of cuBLAS products: a chunk that is no multiple leaves part of the last tile idle
_TILE_TOKENS = 128
_SMALL_TILE_TOKENS = 16

# a row stride of whole 16s is what Triton takes for proof that rows are aligned; cuBLAS's fast kernels want 16 bytes
_ROW_ALIGNMENT_ELEMENTS = 16


# of the row kernel, in fp32, for each token whose logits are made block by block of the vocabulary
STATISTICS_BYTES = 4 * 4


# tokens of a chunk from which on it costs less to read and write the head's gradient for it than to make its logits
# twice, as measured at 2048 and 4096 hidden elements
_WORTHWHILE_TOKENS = 384


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkPlan:
    """How one fused loss spreads its logits over memory.

    The first `scratch_tokens` have their logits in the bytes of the head's gradient, which is written last: those of
    vocabulary block 0 in the workspace and those of block i where the gradient's rows of block i - 1 will be. Written
    from the last block to the first, the gradient overwrites only logits that were used. The remaining tokens come
    chunk by chunk through the workspace. Small chunks would read and write the head's gradient too often: where
    `recomputed`, the remaining tokens go through the scratch first, chunk by chunk, for their losses and the hidden
    states' gradient, and their logits are made again, block by block in the workspace, for the head's.

    Attributes:
        scratch_tokens: 0 where no gradient's bytes are used.
        block_words: vocabulary words of a block, the last block may hold fewer; 0 without scratch.
        chunk_tokens: tokens of a chunk, the last chunk may hold fewer; 0 where scratch takes all.
        chunks: of the remaining tokens.
        recomputed: whether their logits are made twice.
        row_elements: elements from one row of a chunk's logits to the next.
        workspace_bytes: of the one buffer that holds a chunk's logits, or block 0 and all rows' statistics.
    """

    scratch_tokens: int
    block_words: int
    chunk_tokens: int
    chunks: int
    recomputed: bool
    row_elements: int
    workspace_bytes: int


def plan_chunks(
    *, tokens: int, hidden: int, vocab: int, element_bytes: int, budget: str | int, gradient_bytes: int = 0
) -> ChunkPlan:
    """Choose chunks for a budget.

    Args:
        tokens: rows of the hidden states.
        element_bytes: bytes of a logit as it is stored (2 or 4).
        budget: `lean` (no more than liger-kernel's chunk), `balanced` (256 MiB), or bytes.
        gradient_bytes: bytes an element of the head's gradient; 0 where none is made.

    Raises:
        RecipeError: an unknown word, or fewer bytes than the smallest chunk takes.
    """
    row_elements = aligned(vocab)
    row_bytes = row_elements * element_bytes
    if budget == "lean":
        largest = lean_chunk_tokens(tokens=tokens, hidden=hidden, vocab=vocab)
        budget_bytes = largest * row_bytes
    else:
        budget_bytes = _budget_bytes(budget)
        largest = _tokens_within(budget_bytes, row_bytes, tokens)
    most = min(tokens, hidden * gradient_bytes // element_bytes)
    budget_bytes -= tokens * STATISTICS_BYTES
    scratch = _plan_scratch(most, largest, vocab, element_bytes, budget_bytes, gradient_bytes)
    rest = tokens - scratch.tokens
    recomputed = scratch.tokens > 0 and largest < min(rest, _WORTHWHILE_TOKENS)
    chunk_tokens = _equal_chunks(rest, scratch.tokens if recomputed else largest)
    chunk_bytes = 0 if recomputed else chunk_tokens * row_bytes
    scratch_bytes = scratch.workspace_bytes + tokens * STATISTICS_BYTES if scratch.tokens else 0
    return ChunkPlan(
        scratch_tokens=scratch.tokens,
        block_words=scratch.block_words,
        chunk_tokens=chunk_tokens,
        chunks=-(-rest // chunk_tokens) if rest else 0,
        recomputed=recomputed,
        row_elements=row_elements,
        workspace_bytes=max(chunk_bytes, scratch_bytes),
    )


@dataclass(frozen=True, slots=True)
class _Scratch:
    tokens: int = 0
    block_words: int = 0
    workspace_bytes: int = 0


def _plan_scratch(
    most: int, largest_chunk: int, vocab: int, element_bytes: int, budget_bytes: int, gradient_bytes: int
) -> _Scratch:
    """As many tokens as the gradient's bytes hold, if that is more than a chunk.

    The hidden states' gradient is summed in fp32 where the head's last block of gradients will be, so that block
    bounds the tokens too.
    """
    for tokens in range(_whole_tiles(most), largest_chunk, -_tile_tokens(most)):
        room = budget_bytes // (tokens * element_bytes)
        most_words = room // _ROW_ALIGNMENT_ELEMENTS * _ROW_ALIGNMENT_ELEMENTS
        if most_words < 1:
            continue
        words = aligned(-(-vocab // -(-vocab // most_words)))
        last_words = vocab - (-(-vocab // words) - 1) * words
        if last_words * gradient_bytes >= tokens * FP32_BYTES:
            return _Scratch(tokens, words, words * tokens * element_bytes)
    return _Scratch()


def aligned(elements: int) -> int:
    """The stride of rows of so many elements."""
    return _round_up(elements, _ROW_ALIGNMENT_ELEMENTS)


def lean_chunk_tokens(*, tokens: int, hidden: int, vocab: int) -> int:
    """Tokens of liger-kernel 0.8.5's chunk: the power of two that makes logits about as large as hidden states."""
    growth = -(-vocab // hidden)
    share = -(-tokens // growth)
    return min(1 << (share - 1).bit_length(), tokens)


def _budget_bytes(budget: str | int) -> int:
    if budget == "balanced":
        return BALANCED_BYTES
    if isinstance(budget, str):
        raise RecipeError(f"unknown flce budget {budget!r}. Known: lean, balanced, or a number of bytes.")
    return budget


def _tokens_within(budget_bytes: int, row_bytes: int, tokens: int) -> int:
    fitting = budget_bytes // row_bytes
    if fitting >= tokens:
        return tokens
    smallest = min(tokens, _SMALL_TILE_TOKENS)
    if fitting < smallest:
        raise RecipeError(
            f"an flce budget of {format_bytes(budget_bytes)} holds no chunk: {smallest} tokens of logits take"
            f" {format_bytes(smallest * row_bytes)}. Give at least that."
        )
    return fitting


def _equal_chunks(tokens: int, largest: int) -> int:
    """Split evenly into as few chunks as `largest` allows, whole tiles each."""
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
