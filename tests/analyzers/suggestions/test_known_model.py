import pytest

from ligerprof.analyzers.explain.analysis import analyze
from ligerprof.analyzers.suggestions.case import Case
from ligerprof.analyzers.suggestions.fused_loss import find_recipe
from ligerprof.models import spec_from_config
from ligerprof.recipe.categories import Attention, Precision
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.simulated import simulate_step
from ligerprof.snapshots.reader import Snapshot
from tests.recorded import analysis
from tests.sampling import sampled

LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 16000,
}


def case_of(recipe: TrainingRecipe) -> Case:
    return analyze(Snapshot.from_dict(simulate_step(recipe).snapshot))._case


@pytest.mark.parametrize(
    ("name", "precision", "sizes"),
    [
        ("hf-nockpt-8x1024", Precision.BF16, (2048, 16, 8192, 32, 8)),
        ("fsdp2-norms", Precision.BF16, (1024, 6, 2816, 16, 4)),
        ("small-graphs", Precision.BF16, (512, 4, 1536, 8, 4)),
        ("small-autocast", Precision.AMP, (512, 4, 1536, 8, 4)),
        ("ddp-bf16-hook", Precision.FP32, (1024, 6, 2816, 16, 4)),
    ],
)
def test_a_recorded_model_is_known_with_its_heads(name: str, precision: Precision, sizes: tuple[int, ...]) -> None:
    recipe = find_recipe(analysis(name)._case)

    assert recipe is not None
    spec = recipe.spec
    assert (spec.hidden_size, spec.layers, spec.intermediate_size, spec.heads, spec.kv_heads) == sizes
    assert recipe.precision is precision


def test_adapters_and_weights_without_their_shapes_are_not_taken_for_a_model() -> None:
    # with adapters; sharded weights; fp32 scores whose size checkpointing hides
    for name in ("small-lora", "fsdp1", "zero3-offload-4x1024", "oom-optimizer"):
        assert find_recipe(analysis(name)._case) is None, name


@pytest.mark.parametrize("checkpointing", [False, True])
@sampled("heads", [8, 4], every=2)
def test_a_known_model_has_scores_as_large_as_recorded(heads: int, *, checkpointing: bool) -> None:
    config = {**LLAMA, "num_attention_heads": heads, "num_key_value_heads": heads // 2}
    recipe = TrainingRecipe(
        model=spec_from_config(config, name="llama"),
        device="simulated",
        batch=4,
        seq=512,
        precision=Precision.AMP,
        attention=Attention.EAGER,
        checkpointing=checkpointing,
    )

    found = find_recipe(case_of(recipe))

    assert found is not None
    # half the heads with sequences twice as long keep the same bytes
    assert (found.tokens, found.spec.heads * found.seq) == (recipe.tokens, heads * recipe.seq)
