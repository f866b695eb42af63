"""Decide how many tokens the fused loss takes at a time: the one rule for kernel and estimator."""

from dataclasses import dataclass

from ligerprof.errors import RecipeError
from ligerprof.units import MIB, format_bytes

# one chunk of 1024 tokens of a 128256-word vocabulary in 16 bit, and little more
BALANCED_BYTES = 256 * MIB

# tiles of cuBLAS products: a chunk that is no multiple leaves part of the last tile idle
_TILE_TOKENS = 128
_SMALL_TILE_TOKENS = 16

# a row stride of whole 16s is what Triton takes for proof that rows are aligned; cuBLAS's fast kernels want 16 bytes
_ROW_ALIGNMENT_ELEMENTS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkPlan:
    """The workspace of one fused loss.

    Attributes:
        chunk_tokens: tokens whose logits exist at a time; the last chunk may hold fewer.
        chunks: passes over the head's weight.
        row_elements: elements from one row of logits to the next.
        workspace_bytes: of the one buffer that holds a chunk's logits.
    """

    chunk_tokens: int
    chunks: int
    row_elements: int
    workspace_bytes: int


def plan_chunks(*, tokens: int, hidden: int, vocab: int, element_bytes: int, budget: str | int) -> ChunkPlan:
    """Choose the chunk for a budget.

    Args:
        tokens: rows of the hidden states.
        element_bytes: bytes of a logit as it is stored (2 or 4).
        budget: `lean` (no more than liger-kernel's chunk), `balanced` (256 MiB), or bytes.

    Raises:
        RecipeError: an unknown word, or fewer bytes than the smallest chunk takes.
    """
    row_elements = _round_up(vocab, _ROW_ALIGNMENT_ELEMENTS)
    row_bytes = row_elements * element_bytes
    if budget == "lean":
        largest = lean_chunk_tokens(tokens=tokens, hidden=hidden, vocab=vocab)
    else:
        largest = _tokens_within(_budget_bytes(budget), row_bytes, tokens)
    chunk_tokens = _equal_chunks(tokens, largest)
    return ChunkPlan(
        chunk_tokens=chunk_tokens,
        chunks=-(-tokens // chunk_tokens),
        row_elements=row_elements,
        workspace_bytes=chunk_tokens * row_bytes,
    )


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
    tile = _TILE_TOKENS if largest >= _TILE_TOKENS else _SMALL_TILE_TOKENS if largest >= _SMALL_TILE_TOKENS else 1
    whole_tiles = largest // tile * tile
    chunks = -(-tokens // whole_tiles)
    return min(_round_up(-(-tokens // chunks), tile), whole_tiles)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
