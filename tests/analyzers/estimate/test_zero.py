"""What one of N GPUs holds under DeepSpeed in fp32, in bytes per parameter."""

import pytest

from ligerprof.analyzers.estimate import estimate
from ligerprof.errors import RecipeError
from ligerprof.models import spec_from_config
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Phase, Role

GPUS = 4


def of_stage(zero: int, **options: object) -> TrainingRecipe:
    given = {"model": "llama3.2-1b", "batch": 1, "seq": 128, "engine": "deepspeed", "gpus": GPUS, "precision": "fp32"}
    return TrainingRecipe(**{**given, "zero": zero, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(("zero", "weights", "states"), [(0, 4, 8), (1, 4, 12 / 4), (2, 4, 12 / 4), (3, 1, 12 / 4)])
def test_weights_and_states_in_fp32(zero: int, weights: float, states: float) -> None:
    """A copy of the weights and two moments, but for stage 0, which has the moments alone."""
    recipe = of_stage(zero)
    roles = estimate(recipe).roles
    parameters = sum(item.elements for item in recipe.spec.parameters)
    assert roles[Role.PARAMETERS] == pytest.approx(weights * parameters, rel=1e-6)
    assert roles[Role.OPTIMIZER_STATES] == pytest.approx(states * parameters, rel=1e-6)


def test_stage_0_reduces_gradients_in_flat_copies() -> None:
    """Of about 5e8 elements: more than the optimizer's step needs."""
    with_copies, without = estimate(of_stage(0, clip=None)), estimate(of_stage(1, clip=None))
    assert with_copies.phases != without.phases
    parameters = sum(item.elements for item in of_stage(0).spec.parameters)
    assert with_copies.peak_bytes > (4 + 4 + 8) * parameters + 4 * 500_000_000


@pytest.mark.parametrize("precision", ["bf16", "amp"])
def test_other_precisions_are_refused(precision: str) -> None:
    with pytest.raises(RecipeError, match=f"engine deepspeed trains in mixed, mixed-fp16 or fp32, not {precision}"):
        of_stage(1, precision=precision)


def test_parts_of_gathered_weights_keep_them() -> None:
    """Experts in turn save views of frozen weights: each layer adds all of its experts' weights besides its share."""
    hidden, width, experts = 512, 2048, 8
    config = {
        "model_type": "mixtral",
        "vocab_size": 20000,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_attention_heads": 8,
        "num_local_experts": experts,
    }
    options = {"experts": "eager", "precision": "mixed", "checkpointing": False, "lora": 8, "seq": 32, "gpus": 2}
    three, four = (
        estimate(of_stage(3, model=spec_from_config({**config, "num_hidden_layers": layers}, name="m"), **options))
        for layers in (3, 4)
    )
    experts_bytes = 2 * 3 * experts * hidden * width
    assert four.phases[Phase.BACKWARD] - three.phases[Phase.BACKWARD] > 1.4 * experts_bytes
