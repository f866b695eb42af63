"""The fused loss's planner against the rules it states."""

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ligerprof.errors import RecipeError
from ligerprof.kernels.cross_entropy.spec import statistics_bytes
from ligerprof.kernels.linear_cross_entropy.plan import (
    BALANCED_BYTES,
    aligned,
    lean_chunk_tokens,
    plan_chunks,
    split_words,
)
from ligerprof.units import MIB

SIZES = {
    "tokens": st.integers(1, 70_000),
    "hidden": st.integers(1, 20_000),
    "vocab": st.integers(1, 300_000),
    "element_bytes": st.sampled_from([2, 4]),
}


BUDGETS = st.one_of(st.sampled_from(["lean", "balanced"]), st.integers(20 * MIB, 2000 * MIB))


@given(**SIZES, budget=BUDGETS)
def test_chunks_cover_the_tokens_within_the_budget(
    tokens: int, hidden: int, vocab: int, element_bytes: int, budget: str | int
) -> None:
    plan = plan_chunks(tokens=tokens, hidden=hidden, vocab=vocab, element_bytes=element_bytes, budget=budget)
    assert (plan.chunks - 1) * plan.chunk_tokens < tokens <= plan.chunks * plan.chunk_tokens
    assert plan.chunk_tokens <= tokens
    assert plan.row_elements % 16 == 0
    assert vocab <= plan.row_elements < vocab + 16
    assert plan.workspace_bytes == plan.chunk_tokens * plan.row_elements * element_bytes
    assert (plan.scratch_tokens, plan.blocks, plan.recomputed) == (0, (), False)
    if budget == "lean":
        assert plan.chunk_tokens <= lean_chunk_tokens(tokens=tokens, hidden=hidden, vocab=vocab)
    else:
        assert plan.workspace_bytes <= (BALANCED_BYTES if budget == "balanced" else budget)
    if plan.chunks > 1 and plan.chunk_tokens > 128:
        assert plan.chunk_tokens % 16 == 0
        # tiles that are not whole must save a chunk
        largest = plan.chunk_tokens // 128 * 128
        assert plan.chunk_tokens % 128 == 0 or -(-tokens // largest) > plan.chunks


@given(**SIZES, budget=BUDGETS, gradient_bytes=st.sampled_from([2, 4]))
def test_no_gradient_is_written_over_logits_that_are_still_needed(
    tokens: int, hidden: int, vocab: int, element_bytes: int, budget: str | int, gradient_bytes: int
) -> None:
    """The head's gradient holds logits until it is written: every write against every block that is yet to be read."""
    sizes = {"tokens": tokens, "hidden": hidden, "vocab": vocab, "element_bytes": element_bytes, "budget": budget}
    plain, plan = plan_chunks(**sizes), plan_chunks(**sizes, gradient_bytes=gradient_bytes)  # type: ignore[arg-type]
    lean_bytes = lean_chunk_tokens(tokens=tokens, hidden=hidden, vocab=vocab) * plain.row_elements * element_bytes
    allowed_bytes = {"lean": lean_bytes, "balanced": BALANCED_BYTES}.get(str(budget), budget)
    assert plan.workspace_bytes <= max(plain.workspace_bytes, int(allowed_bytes))
    rest = tokens - plan.scratch_tokens
    assert (plan.chunks - 1) * plan.chunk_tokens < rest <= plan.chunks * plan.chunk_tokens or rest == plan.chunks == 0
    assert not plan.recomputed or plan.chunk_tokens <= plan.scratch_tokens
    if not plan.scratch_tokens:
        assert plan == plain
        return
    row_bytes = hidden * gradient_bytes
    widths = plan.blocks
    starts = [0, *accumulate(widths[:-1])]
    assert sum(widths) == vocab
    logits = [
        (before * row_bytes, before * row_bytes + plan.scratch_tokens * aligned(width) * element_bytes)
        for before, width in zip(starts, widths[1:], strict=False)
    ]
    assert plan.scratch_tokens * aligned(widths[0]) <= plan.block_elements
    kept_bytes = tokens * statistics_bytes() if plan.recomputed else 0
    assert plan.block_elements * element_bytes + kept_bytes <= plan.workspace_bytes
    # the row kernel computes the blocks' sizes from the first one
    grow_to, grow_from = plan.growth(hidden * gradient_bytes // element_bytes)
    assert all(after == before * grow_to // grow_from // 16 * 16 for before, after in pairwise(widths[:-1]))
    for number in reversed(range(len(widths))):
        written = (starts[number] * row_bytes, (starts[number] + widths[number]) * row_bytes)
        # block `number` itself lies before, and so do those that are written after it
        assert all(stop <= written[0] for _, stop in logits[:number])
    # the hidden states' gradient is summed where the last block's gradient will be
    assert plan.scratch_tokens * hidden * 4 <= widths[-1] * row_bytes
    assert all(stop <= starts[-1] * row_bytes for _, stop in logits)
    if plan.recomputed:
        # whole rows lie in the head's gradient, and blocks in the workspace
        assert plan.chunk_tokens * plan.row_elements * element_bytes <= vocab * row_bytes
        again = min(rest, plan.recomputed_tokens)
        assert again >= plan.chunk_tokens
        words = plan.recomputed_words(again)
        assert words > 0
        assert again * words <= plan.block_elements


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
        # two chunks of 1040 rather than three of 768
        (2080, 2048, 256 * MIB, 1040, 2),
    ],
)
def test_chunks_of_known_shapes(tokens: int, hidden: int, budget: str | int, chunk: int, chunks: int) -> None:
    plan = plan_chunks(tokens=tokens, hidden=hidden, vocab=128256, element_bytes=2, budget=budget)
    assert (plan.chunk_tokens, plan.chunks) == (chunk, chunks)


def test_budgets_that_hold_nothing_or_mean_nothing_are_refused() -> None:
    with pytest.raises(RecipeError, match="is too small"):
        plan_chunks(tokens=4096, hidden=2048, vocab=128256, element_bytes=2, budget=MIB)
    with pytest.raises(RecipeError, match="unknown flce budget"):
        plan_chunks(tokens=4096, hidden=2048, vocab=128256, element_bytes=2, budget="auto")


@pytest.mark.parametrize(
    ("tokens", "hidden", "budget", "gradient_bytes", "expected"),
    [
        # scratch tokens, then chunks of how many tokens, made twice or once
        (4096, 2048, "lean", 2, (2048, 1, 2048, True)),
        (4096, 2048, "balanced", 2, (2048, 2, 1024, False)),
        (8192, 4096, "lean", 2, (3968, 2, 2176, True)),
        (16384, 2048, "lean", 2, (2048, 28, 512, False)),
        # an fp32 gradient holds twice the tokens
        (4096, 2048, "balanced", 4, (4096, 0, 0, False)),
        # all logits at once need no scratch
        (4096, 2048, 1100 * MIB, 2, (0, 1, 4096, False)),
    ],
)
def test_scratch_of_known_shapes(
    tokens: int, hidden: int, budget: str | int, gradient_bytes: int, expected: tuple[int, int, int, bool]
) -> None:
    plan = plan_chunks(
        tokens=tokens, hidden=hidden, vocab=128256, element_bytes=2, budget=budget, gradient_bytes=gradient_bytes
    )
    assert (plan.scratch_tokens, plan.chunks, plan.chunk_tokens, plan.recomputed) == expected


def waves_of_tiles(words: int, columns: int) -> int:
    """Elements of whole waves of a product's tiles on 132 multiprocessors, two tiles at a time, of the best shape."""
    shapes = ((256, 256), (320, 256), (256, 320), (384, 192), (192, 384))
    return min(-(-(-(-words // high) * -(-columns // wide)) // 66) * 66 * high * wide for high, wide in shapes)


@pytest.mark.parametrize(
    ("tokens", "vocab", "most_words", "blocks", "share"),
    [
        # the share of waves that is idle, next to that of equal blocks
        (2048, 128256, 65024, (64896, 63360), 0.21),
        (2048, 151936, 65024, (50656, 50656, 50624), 1.0),
        (3584, 152064, 37152, (*[33792] * 4, 16896), 0.0),
        (3584, 256000, 37152, (*[37120] * 6, 33280), 0.385),
        (3072, 128256, 43344, (43008, 43008, 42240), 0.476),
    ],
)
def test_blocks_fill_waves_of_tiles(
    tokens: int, vocab: int, most_words: int, blocks: tuple[int, ...], share: float
) -> None:
    sizes = {"tokens": tokens, "hidden": tokens, "row_tokens": tokens, "vocab": vocab, "last_words": 2 * tokens}
    assert split_words(most_words, **sizes) == blocks
    equal = [aligned(-(-vocab // len(blocks)))] * (len(blocks) - 1)
    idle, of_equal = (
        sum(waves_of_tiles(words, tokens) for words in layout) / (tokens * vocab) - 1
        for layout in (blocks, (*equal, vocab - sum(equal)))
    )
    assert idle / of_equal == pytest.approx(share, abs=0.02)


@given(
    tokens=st.integers(1, 8192),
    growth=st.integers(1, 4),
    vocab=st.integers(1, 300_000),
    most_words=st.integers(1, 100_000),
    last_words=st.integers(0, 20_000),
)
def test_blocks_cover_the_vocabulary_where_there_is_room(
    tokens: int, growth: int, vocab: int, most_words: int, last_words: int
) -> None:
    row_tokens = growth * tokens
    sizes = {"tokens": tokens, "hidden": row_tokens, "row_tokens": row_tokens, "vocab": vocab}
    blocks = split_words(most_words, **sizes, last_words=last_words)
    if not blocks:
        # equal blocks leave the most words for the last one
        usable = most_words // 16 * 16
        assert usable == 0 or vocab - (-(-vocab // usable) - 1) * aligned(-(-vocab // -(-vocab // usable))) < last_words
        return
    assert sum(blocks) == vocab
    assert blocks[0] <= most_words
    assert blocks[-1] >= max(last_words, 1)
    assert all(words % 16 == 0 for words in blocks[:-1])
    # each lies in the rows of the one before
    assert all(tokens * aligned(after) <= row_tokens * before for before, after in pairwise(blocks))
