import re
from typing import Any

import pytest
import torch

from ligerprof.errors import ModelCodeError, RecipeError
from ligerprof.models import spec_from_config
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Phase
from ligerprof.runs.simulated import simulate_step
from ligerprof.runs.simulated.rank import model_failures_in_a_line
from ligerprof.units import parse_bytes

MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "num_local_experts": 4,
}


def recipe_of(config: dict[str, Any], **options: Any) -> TrainingRecipe:
    return TrainingRecipe(model=spec_from_config(config, name="made"), batch=2, seq=64, **options)


def test_what_the_models_code_raises_is_one_line_with_its_place() -> None:
    broken = {**MIXTRAL, "model_type": "gpt2", "activation_function": "nope"}
    with pytest.raises(ModelCodeError) as raised:
        simulate_step(recipe_of(broken))
    assert re.fullmatch(
        r"made: the code of gpt2 fails at \w+\.py:\d+ with KeyError: 'nope'\. Check .*", str(raised.value)
    )


def test_attention_that_an_architecture_lacks_is_named_with_what_to_add(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers
    from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel

    # as from transformers 5.2x on
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", False)
    with pytest.raises(RecipeError) as raised:
        simulate_step(TrainingRecipe(model="gemma2-2b", attention="sdpa"))
    said = f"gemma2-2b: transformers {transformers.__version__} has no sdpa for gemma2, "
    assert str(raised.value).startswith(said)
    assert str(raised.value).endswith("Add --attention eager.")


def test_a_failure_of_this_package_keeps_its_traceback() -> None:
    with pytest.raises(TypeError), model_failures_in_a_line(TrainingRecipe(model="tiny")):
        parse_bytes(None)  # type: ignore[arg-type]


def test_expected_errors_and_those_of_the_caller_pass() -> None:
    recipe = TrainingRecipe(model="tiny")
    with pytest.raises(RecipeError, match="first"), model_failures_in_a_line(recipe):
        raise RecipeError("first")
    with pytest.raises(ZeroDivisionError), model_failures_in_a_line(recipe, ZeroDivisionError):
        torch.tensor([1.0]).reshape(1 // 0)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32", "amp"])
def test_grouped_products_of_experts_run_in_every_precision(precision: str) -> None:
    outcome = simulate_step(recipe_of(MIXTRAL, precision=precision), record=False)
    assert outcome.oom is None
    # weights, gradients and two moments of the experts alone
    experts = 2 * 4 * 3 * 64 * 96
    assert outcome.after_phase[Phase.OPTIMIZER] >= 4 * experts * (2 if precision in ("bf16", "fp16") else 4)
