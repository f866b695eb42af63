"""Each loss gives the value and the gradients of transformers' own, and is attributed as it is estimated."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from ligerprof.analyzers.estimate import estimate
from ligerprof.analyzers.explain.analysis import explain
from ligerprof.errors import MissingDependencyError
from ligerprof.models import CONFIGS, spec_from_config
from ligerprof.recipe.categories import Loss
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Role
from ligerprof.runs.simulated import simulate_step
from ligerprof.runs.training import built_model, make_batch
from ligerprof.snapshots.reader import Snapshot
from ligerprof.units import MIB
from tests.sampling import sampled

CHUNKED = [loss for loss in Loss if loss.is_chunked]
# of 2 x 400 tokens, TRL's chunks leave one that is not full, and F.linear_cross_entropy's too
SIZES: dict[str, Any] = {"model": "tiny", "batch": 2, "seq": 400, "precision": "fp32", "checkpointing": False}
# of layers so small that the loss is the peak, with a vocabulary of which no tensor is as large as a weight
HEAD = {"num_hidden_layers": 2, "hidden_size": 320, "intermediate_size": 640, "vocab_size": 50_000, "head_dim": 64}
SMALL = spec_from_config(
    {**CONFIGS["llama3.2-1b"], **HEAD, "num_attention_heads": 5, "num_key_value_heads": 5}, name="small"
)

pytestmark = pytest.mark.usefixtures("no_log_records")

if not hasattr(functional, "linear_cross_entropy"):
    CHUNKED.remove(Loss.TORCH_LINEAR)


def loss_and_gradients(recipe: TrainingRecipe) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    device = torch.device("cpu")
    with built_model(recipe, device) as model:
        loss = model(**make_batch(recipe, device), use_cache=False).loss
        loss.backward()
        return loss.detach(), {name: item.grad for name, item in model.named_parameters() if item.grad is not None}


@sampled("more", [{}, {"padding": 0.3}, {"packing": True}], ids=["plain", "padded", "packed"], every=2)
@pytest.mark.parametrize("loss", CHUNKED)
def test_value_and_gradients_are_those_of_transformers(loss: Loss, more: dict[str, Any]) -> None:
    expected, gradients = loss_and_gradients(TrainingRecipe(**SIZES, **more))
    found, computed = loss_and_gradients(TrainingRecipe(**SIZES, **more, loss=loss))

    torch.testing.assert_close(found, expected)
    assert computed.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(computed[name], gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("loss", ["chunked-nll", "trl-tiled"])
def test_an_evaluation_scores_all_tokens_of_its_batch(loss: str) -> None:
    found = []
    for chosen in ("hf", loss):
        recipe = TrainingRecipe(**{**SIZES, "batch": 1}, eval_batch=3, loss=chosen)
        assert recipe.evaluation is not None
        torch.manual_seed(0)
        with built_model(recipe, torch.device("cpu")) as model, torch.no_grad():
            batch = make_batch(recipe.evaluation, torch.device("cpu"))
            found.append(model.eval()(**batch, use_cache=False).loss)
    torch.testing.assert_close(found[1], found[0])


def test_gradients_of_accumulated_micro_batches_are_divided_once() -> None:
    _, whole = loss_and_gradients(TrainingRecipe(**SIZES, loss="titan-chunked"))
    _, half = loss_and_gradients(TrainingRecipe(**SIZES, loss="titan-chunked", grad_accum=2))
    torch.testing.assert_close(2 * half["model.norm.weight"], whole["model.norm.weight"])


@pytest.mark.parametrize("loss", ["chunked-nll", "trl-tiled"])
def test_capped_logits(loss: str) -> None:
    config = {**CONFIGS["gemma2-2b"], "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 500}
    model = spec_from_config({**config, **heads}, name="capped")
    sizes: dict[str, Any] = {**SIZES, "model": model, "attention": "eager"}
    expected, gradients = loss_and_gradients(TrainingRecipe(**sizes))
    found, computed = loss_and_gradients(TrainingRecipe(**sizes, loss=loss))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        computed["model.embed_tokens.weight"], gradients["model.embed_tokens.weight"], rtol=1e-3, atol=1e-6
    )


def test_a_torch_without_the_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(functional, "linear_cross_entropy", raising=False)
    with pytest.raises(MissingDependencyError, match=r"^--loss torch-linear: torch .* Install torch 2\.13"):
        loss_and_gradients(TrainingRecipe(**SIZES, loss="torch-linear"))


@sampled("precision", ["amp", "bf16", "fp32"], every=3)
@pytest.mark.parametrize("loss", CHUNKED)
def test_roles_at_the_peak_are_the_estimated_ones(loss: Loss, precision: str) -> None:
    options: dict[str, Any] = {"model": SMALL, "batch": 8, "seq": 512, "optimizer": "none", "precision": precision}
    recipe = TrainingRecipe(**options, loss=loss, alloc_conf="expandable_segments:True")
    outcome = simulate_step(recipe)
    found = explain(Snapshot.from_dict(outcome.snapshot), step=outcome.profiled_step).roles
    expected = estimate(recipe).roles

    assert found.total_bytes == outcome.peak_bytes
    assert found[Role.UNATTRIBUTED] == 0
    for role in (Role.LOGITS, Role.CE_TEMPORARIES, Role.GRADIENTS, Role.KERNEL_WORKSPACE, Role.WEIGHT_CASTS):
        assert abs(found[role] - expected[role]) <= 4 * MIB, role
