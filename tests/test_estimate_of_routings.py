"""Experts that run one after another: the estimate against the simulation, whatever the routing."""

from dataclasses import replace
from random import Random

import pytest

from ligerprof.analyzers.estimate import estimate
from ligerprof.models import ARCHITECTURES, spec_from_config
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.simulated import simulate_step
from tests.drawn_recipes import draw_recipe

MIXTURES = {name: row.mlp.experts for name, row in ARCHITECTURES.items() if row.mlp.experts is not None}
FAMILIES = sorted(name for name, experts in MIXTURES.items() if not experts.multiplies_all)
QUICK = ("gpt_oss", "mixtral", "qwen2_moe")
# docs/estimate.md quotes it
TOLERANCE = 0.002

pytestmark = pytest.mark.usefixtures("no_log_records")


def drawn(family: str, number: int) -> TrainingRecipe:
    """A recipe whose experts run in turn, with a routing per layer."""
    random = Random(f"{family} {number}")
    config = draw_recipe(Random(f"{family} 1"), family).spec.config
    spec = spec_from_config(config, name=family)
    layers = sum(spec.layer_kinds.sparse)
    rows = [[random.randint(spec.chosen_experts, 2 * spec.chosen_experts) for _ in range(spec.experts)]] * layers
    rows = [random.sample(row, len(row)) for row in rows]
    file = ";".join(",".join(map(str, row)) for row in rows)
    return TrainingRecipe(
        model=spec,
        experts="eager",
        # a drawn model may have no layers with experts
        routing=random.choice(("uniform", "worst", file or "uniform")),
        precision=random.choice(("bf16", "amp", "fp32")),
        checkpointing=random.random() < 0.5,
        batch=random.randint(1, 3),
        seq=random.randint(300, 600),
        attention="eager" if family == "gpt_oss" else "sdpa",
        # every block is split, so that the peak is one number
        alloc_conf="expandable_segments:True",
        gpu="h200",
    )


def check(recipe: TrainingRecipe) -> None:
    estimated, simulated = estimate(recipe), simulate_step(recipe, record=False)
    assert estimated.peak_bytes == pytest.approx(simulated.peak_bytes, rel=TOLERANCE), recipe


@pytest.mark.parametrize("family", QUICK)
def test_an_estimate_of_a_routing_is_what_the_simulation_takes(family: str) -> None:
    check(drawn(family, 0))


@pytest.mark.parametrize("family", ["exaone_moe", "flex_olmo"])
def test_gradients_of_experts_add_up_before_they_join_others(family: str) -> None:
    """That of a shared expert, and that of the residual stream, which these experts read."""
    recipe = replace(drawn(family, 0), routing="uniform", precision="amp", checkpointing=False, batch=2, seq=384)
    estimated, simulated = estimate(recipe).peak_bytes, simulate_step(recipe, record=False).peak_bytes
    assert abs(estimated - simulated) < recipe.tokens * recipe.spec.hidden_size


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_5_moe_text"])
def test_phases_are_the_simulated_ones_to_a_few_kilobytes(family: str) -> None:
    """Masks have the classes that the code gives them, and backward sorts the tokens of each expert."""
    check_phases(drawn(family, 0))


def test_gradients_of_a_shared_expert_that_runs_later_are_there_first() -> None:
    """Those of experts are added to them."""
    check_phases(drawn("hy_v3", 6))


def check_phases(recipe: TrainingRecipe) -> None:
    estimated, simulated = estimate(recipe), simulate_step(recipe, record=False)
    assert {phase for phase, size in simulated.phases.items() if abs(estimated.phases[phase] - size) > 8192} == set()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_more_routings(family: str) -> None:
    for number in range(1, 9):
        check(drawn(family, number))


def test_the_range_is_that_of_the_two_routings() -> None:
    recipe = replace(drawn("mixtral", 3), routing="uniform", precision="amp", checkpointing=False, liger="flce")
    found = estimate(recipe)
    worst = estimate(replace(recipe, routing="worst"))
    assert found.routing is not None
    assert found.routing == worst.routing
    assert (found.routing.uniform_bytes, found.routing.worst_bytes) == (found.peak_bytes, worst.peak_bytes)
    assert found.peak_bytes != worst.peak_bytes
    assert found.to_json()["routing"]["depends"] is True
    assert any("--routing uniform" in sentence for sentence in found.assumed)


def test_grouped_products_do_not_depend_on_the_routing() -> None:
    recipe = replace(drawn("mixtral", 1), experts=None, routing="uniform")
    one, other = (estimate(replace(recipe, routing=routing)) for routing in ("uniform", "worst"))
    assert one.peak_bytes == other.peak_bytes
    assert one.routing is not None
    assert not one.routing.depends
    assert one.routing.uniform_bytes == one.routing.worst_bytes == one.peak_bytes
    config = {**recipe.spec.config, "experts_implementation": "eager"}
    in_turn = estimate(replace(recipe, model=spec_from_config(config, name="mixtral")))
    assert in_turn.routing is not None
    assert in_turn.routing.implementation == "eager"
    dense = estimate(TrainingRecipe(model="tiny"))
    assert dense.routing is None
    assert dense.to_json()["routing"] is None
