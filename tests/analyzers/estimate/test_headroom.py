"""`--flce-budget auto`: the largest workspace that costs the step nothing."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ligerprof.analyzers.estimate import estimate, find_headroom, headroom_note, settle_flce_budget
from ligerprof.kernels.linear_cross_entropy.plan import aligned
from ligerprof.models import spec_from_config
from ligerprof.models.names import CONFIGS
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.simulated import simulate_step


def peak(recipe: TrainingRecipe, **changes: object) -> int:
    estimated = estimate(dataclasses.replace(recipe, **changes))  # type: ignore[arg-type]
    return max(estimated.peak_bytes, estimated.first_step_peak_bytes)


@st.composite
def recipes(draw: st.DrawFn) -> TrainingRecipe:
    config = {
        **CONFIGS["llama3.2-1b"],
        "num_hidden_layers": draw(st.integers(1, 24)),
        "hidden_size": 512,
        "intermediate_size": draw(st.sampled_from([512, 2048])),
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": draw(st.integers(500, 130_000)),
    }
    return TrainingRecipe(
        model=spec_from_config(config, name="made"),
        liger=draw(st.sampled_from(["all", "flce"])),
        batch=draw(st.integers(1, 8)),
        seq=draw(st.integers(1, 1500)),
        precision=draw(st.sampled_from(["amp", "bf16", "fp32"])),
        checkpointing=draw(st.booleans()),
        grad_accum=draw(st.integers(1, 2)),
        optimizer=draw(st.sampled_from(["adamw-fused", "sgd", "none"])),
        flce_budget="auto",
    )


@given(recipe=recipes())
@settings(max_examples=6, deadline=None)
def test_it_costs_nothing_and_the_next_tile_would(recipe: TrainingRecipe) -> None:
    found = find_headroom(recipe)
    lean_peak = peak(recipe, flce_budget="lean")
    assert found.peak_bytes == peak(recipe) == peak(recipe, flce_budget=found.budget) <= lean_peak
    element_bytes = 4 if recipe.precision == "fp32" else 2
    tile_bytes = 128 * aligned(recipe.spec.vocab_size) * element_bytes
    whole_bytes = recipe.tokens * aligned(recipe.spec.vocab_size) * element_bytes
    larger = tile_bytes if found.budget == "lean" else int(found.budget) + tile_bytes
    assert found.budget == whole_bytes or peak(recipe, flce_budget=min(larger, whole_bytes)) > lean_peak


def test_the_loss_of_a_full_finetune_runs_in_one_chunk_for_nothing() -> None:
    """No gradients exist yet when the loss runs: there is room for all logits."""
    recipe = TrainingRecipe(precision="bf16", liger="all", flce_budget="auto")
    assert settle_flce_budget(recipe).flce_budget == 4 * 1024 * 128256 * 2
    note = headroom_note(recipe)
    assert note is not None
    assert note.startswith("flce budget auto: 1002.0 MiB of workspace; the estimated peak is ")
    assert note in estimate(recipe).assumed


def test_where_the_loss_is_the_peak_little_is_left() -> None:
    recipe = TrainingRecipe(precision="bf16", checkpointing=False, liger="all", flce_budget="auto")
    found = find_headroom(recipe)
    assert found.budget == "lean" or int(found.budget) < 128 * 2**20
    assert found.balanced_peak_bytes > found.peak_bytes


def test_what_runs_is_what_was_estimated() -> None:
    model = spec_from_config({**CONFIGS["llama3.2-1b"], "num_hidden_layers": 2}, name="two layers")
    for budget in ("auto", "lean"):
        recipe = TrainingRecipe(model=model, precision="bf16", liger="all", flce_budget=budget, batch=2)
        simulated = simulate_step(recipe, record=False)
        assert simulated.peak_bytes == pytest.approx(estimate(recipe).peak_bytes, rel=1e-3)


def test_only_auto_is_settled() -> None:
    recipe = TrainingRecipe(liger="all", flce_budget=2**28)
    assert settle_flce_budget(recipe) is recipe
    assert headroom_note(recipe) is None
    without = TrainingRecipe(liger="rms", flce_budget="auto")
    assert settle_flce_budget(without).flce_budget == "balanced"
    assert headroom_note(without) is None
