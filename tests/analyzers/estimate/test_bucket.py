"""When the bucket is emptied: every gradient once, never more than fits."""

from hypothesis import given
from hypothesis import strategies as st
from ligerprof.analyzers.estimate.bucket import bucket_flushes

from ligerprof.recipe.training import TrainingRecipe


@given(most=st.integers(10**6, 10**9), model=st.sampled_from(["llama3.2-1b", "gpt2-xl", "gemma2-2b"]))
def test_each_gradient_is_reduced_once_as_soon_as_the_next_finds_no_room(most: int, model: str) -> None:
    config = {"zero_optimization": {"reduce_bucket_size": most}}
    recipe = TrainingRecipe(model=model, engine="deepspeed", precision="mixed", zero=3, deepspeed_config=config)
    found = list(bucket_flushes(recipe))
    assert [item for flush in found for item in flush.held] == [*reversed(recipe.spec.parameters)]
    assert all(flush.elements <= most or len(flush.held) == 1 for flush in found)
    assert [flush.waiting for flush in found] == [*(later.held[0] for later in found[1:]), None]
    assert all(e.waiting is None or e.elements + e.waiting.elements > most for e in found)
