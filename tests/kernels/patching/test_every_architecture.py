"""Kernels in a small model of every architecture: a training goes on as without them."""

from typing import Any

import pytest
import torch

from ligerprof.errors import KernelInputError
from ligerprof.kernels.patching.apply import apply
from ligerprof.models import ARCHITECTURES
from tests.kernels.models import batch, every_tiny_model, fingerprint, train_once
from tests.kernels.oracle import relative_error
from tests.sampling import sampled

STEPS = 5
# docs/kernels.md quotes it
LOSS_BOUND = 1e-5
GRADIENT_BOUND = 1e-4
# one of each way in which rows differ: multipliers, dropout within the MLP, norms of rotated heads, a biased head,
# layers that do not rotate, and norms after the sublayers
INTERPRETED = ("granite", "seed_oss", "hunyuan_v1_dense", "phi", "smollm3", "exaone4")


def losses(model: Any) -> list[float]:
    # a router may draw its experts
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for _ in range(STEPS):
        found.append(train_once(model)[0])
        optimizer.step()
    return found


@sampled("family", sorted(ARCHITECTURES), every=5)
def test_steps_have_the_losses_of_the_model_without_kernels(family: str) -> None:
    model = every_tiny_model(family)
    with torch.no_grad():
        start = [parameter.clone() for parameter in model.parameters()]
    expected, before = losses(model), fingerprint(model)
    kind = type(model(**batch(model)))
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), start, strict=True):
            parameter.copy_(value)
    with apply(model, "all", provider="torch") as patch:
        assert "flce" in patch.kernels
        assert losses(model) == pytest.approx(expected, rel=LOSS_BOUND)
        assert type(model(**batch(model))) is kind
    assert fingerprint(model) == before
    assert expected[-1] < expected[0]


@pytest.mark.parametrize("by_config", [True, False], ids=["config", "argument"])
def test_a_balancing_loss_is_refused_and_not_left_out(by_config: bool) -> None:
    model = every_tiny_model("mixtral")
    model.config.output_router_logits = by_config
    more = {} if by_config else {"output_router_logits": True}
    with apply(model, "flce", provider="torch"), pytest.raises(KernelInputError, match="output_router_logits adds"):
        train_once(model, **more)


@sampled("family", INTERPRETED, every=3)
def test_compiled_kernels_give_the_same_gradients(family: str, device: torch.device) -> None:
    model = every_tiny_model(family, device=device)
    loss, gradients = train_once(model)
    with apply(model, "all"):
        patched_loss, patched = train_once(model)
    assert patched_loss == pytest.approx(loss, rel=LOSS_BOUND)
    assert patched.keys() == gradients.keys()
    assert max(relative_error(patched[name], gradients[name]) for name in gradients) < GRADIENT_BOUND
