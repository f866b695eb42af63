"""One group of layers represents those that repeat it: the figures are those of tracing every layer."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ligerprof.analyzers.estimate import micro_batch
from ligerprof.analyzers.estimate.traced import Repetition
from ligerprof.models import CONFIGS, ModelSpec, spec_from_config
from ligerprof.recipe.training import TrainingRecipe
from tests.analyzers.estimate.test_estimate import recipes, specs
from tests.estimated import fresh


@st.composite
def mixed_specs(draw: st.DrawFn) -> ModelSpec:
    """Models whose first layers are dense, or attend to all tokens, and whose other layers do not."""
    layers, heads, first = draw(st.integers(4, 11)), draw(st.integers(1, 3)), draw(st.integers(0, 11))
    family = draw(st.sampled_from(["glm4_moe", "deepseek_v3", "qwen2", "qwen3_moe"]))
    config: dict[str, Any] = {
        **next(config for config in CONFIGS.values() if config["model_type"] == family),
        "hidden_size": heads * 64,
        "intermediate_size": draw(st.integers(1, 40)) * 8,
        "moe_intermediate_size": draw(st.integers(1, 40)) * 8,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 64,
        "vocab_size": draw(st.integers(2, 10_000)),
        "first_k_dense_replace": first,
        "mlp_only_layers": list(range(first)),
        "n_routed_experts": 8,
        "num_experts": 8,
        "use_sliding_window": True,
        "sliding_window": draw(st.integers(64, 512)),
        "max_window_layers": first,
    }
    return spec_from_config(config, name=f"made-{family}")


@st.composite
def alternating_specs(draw: st.DrawFn) -> ModelSpec:
    """Models whose layers alternate between attention and something else, or between windows and all tokens."""
    family, other = draw(
        st.sampled_from([("lfm2", "conv"), ("gemma3_text", "sliding_attention"), ("qwen3_5_text", "linear_attention")])
    )
    pattern = draw(st.lists(st.booleans(), min_size=2, max_size=4))
    kinds = [*draw(st.lists(st.booleans(), max_size=2)), *pattern * draw(st.integers(3, 4))]
    heads = draw(st.integers(1, 2))
    config: dict[str, Any] = {
        "model_type": family,
        "hidden_size": heads * 64,
        "intermediate_size": 256 * draw(st.integers(1, 2)),
        "num_hidden_layers": len(kinds),
        "layer_types": [other if kind else "full_attention" for kind in kinds],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 64,
        "vocab_size": draw(st.integers(2, 10_000)),
        "sliding_window": draw(st.integers(64, 512)),
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    return spec_from_config(config, name=f"made-{family}")


def _every_layer(recipe: TrainingRecipe) -> list[Repetition]:
    return [Repetition(index) for index in range(recipe.spec.layers)]


@given(
    recipe=recipes(st.one_of(specs(layers=st.integers(4, 9)), mixed_specs(), alternating_specs())),
    every=st.sampled_from([1, 1, 2, 3]),
)
@settings(max_examples=8, deadline=None)
def test_one_of_the_layers_that_are_alike_represents_them_exactly(recipe: TrainingRecipe, every: int) -> None:
    if recipe.checkpointing and not recipe.reentrant:
        recipe = dataclasses.replace(recipe, checkpoint_every=every)
    collapsed = fresh(recipe)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(micro_batch, "traced_layers", _every_layer)
        every_layer = fresh(recipe)
    # of two moments that are equally high, either may be the one whose roles are shown
    for name in ("peak_bytes", "phases", "first_step_peak_bytes", "logits_bytes"):
        assert getattr(collapsed, name) == getattr(every_layer, name)
