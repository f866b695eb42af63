"""The fused loss's planner against the rules it states."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ligerprof.errors import RecipeError
from ligerprof.kernels.flce.plan import BALANCED_BYTES, lean_chunk_tokens, plan_chunks
from ligerprof.units import MIB

SIZES = {
    "tokens": st.integers(1, 70_000),
    "hidden": st.integers(1, 20_000),
    "vocab": st.integers(1, 300_000),
    "element_bytes": st.sampled_from([2, 4]),
}


@given(**SIZES, budget=st.one_of(st.sampled_from(["lean", "balanced"]), st.integers(20 * MIB, 2000 * MIB)))
def test_chunks_cover_the_tokens_within_the_budget(
    tokens: int, hidden: int, vocab: int, element_bytes: int, budget: str | int
) -> None:
    plan = plan_chunks(tokens=tokens, hidden=hidden, vocab=vocab, element_bytes=element_bytes, budget=budget)
    assert (plan.chunks - 1) * plan.chunk_tokens < tokens <= plan.chunks * plan.chunk_tokens
    assert plan.chunk_tokens <= tokens
    assert plan.row_elements % 16 == 0
    assert vocab <= plan.row_elements < vocab + 16
    assert plan.workspace_bytes == plan.chunk_tokens * plan.row_elements * element_bytes
    if budget == "lean":
        assert plan.chunk_tokens <= lean_chunk_tokens(tokens=tokens, hidden=hidden, vocab=vocab)
    else:
        assert plan.workspace_bytes <= (BALANCED_BYTES if budget == "balanced" else budget)
    if plan.chunks > 1 and plan.chunk_tokens > 128:
        assert plan.chunk_tokens % 128 == 0


@given(**SIZES, smaller=st.integers(20 * MIB, 1000 * MIB), more=st.integers(0, 1000 * MIB))
def test_more_bytes_never_mean_more_chunks(
    tokens: int, hidden: int, vocab: int, element_bytes: int, smaller: int, more: int
) -> None:
    few, many = (
        plan_chunks(tokens=tokens, hidden=hidden, vocab=vocab, element_bytes=element_bytes, budget=budget).chunks
        for budget in (smaller + more, smaller)
    )
    assert few <= many


@pytest.mark.parametrize(
    ("tokens", "hidden", "budget", "chunk", "chunks"),
    [
        # the shapes and chunks of liger-kernel 0.8.5: 32 chunks at all three
        (4096, 2048, "lean", 128, 32),
        (16384, 2048, "lean", 512, 32),
        (8192, 4096, "lean", 256, 32),
        (4096, 2048, "balanced", 1024, 4),
        (16384, 2048, "balanced", 1024, 16),
        (8192, 4096, "balanced", 1024, 8),
        # equal chunks rather than two of 2048 and a small rest
        (4224, 2048, 2048 * 128256 * 2, 1408, 3),
        (1000, 2048, "balanced", 1000, 1),
    ],
)
def test_chunks_of_known_shapes(tokens: int, hidden: int, budget: str | int, chunk: int, chunks: int) -> None:
    plan = plan_chunks(tokens=tokens, hidden=hidden, vocab=128256, element_bytes=2, budget=budget)
    assert (plan.chunk_tokens, plan.chunks) == (chunk, chunks)


def test_budgets_that_hold_nothing_or_mean_nothing_are_refused() -> None:
    with pytest.raises(RecipeError, match="holds no chunk"):
        plan_chunks(tokens=4096, hidden=2048, vocab=128256, element_bytes=2, budget=MIB)
    with pytest.raises(RecipeError, match="unknown flce budget"):
        plan_chunks(tokens=4096, hidden=2048, vocab=128256, element_bytes=2, budget="auto")
