"""Objectives on the fused linear loss against the same formulas on plain torch's log-probabilities, in fp64.

The formulas themselves are compared with the published ones, written out.
"""

import dataclasses
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ligerprof.errors import KernelInputError, RecipeError
from ligerprof.kernels.objectives import PRESETS, PreferenceObjective, linear_objective, objective
from ligerprof.kernels.objectives.formulas import PAIR_LOSSES
from ligerprof.kernels.options import LossOptions
from ligerprof.runs.kernel_check.check import ByteMeter
from tests.kernels.oracle import LOSS_ROUNDINGS, leaves, relative_error

VOCAB, HIDDEN = 150, 24
# of 16 tokens of fp32 logits
SMALLEST = 16 * 160 * 4
# of ratios, which multiply the error of a log-probability
TOLERANCE = 10 * LOSS_ROUNDINGS[torch.float32]


def settings_of(name: str) -> dict[str, Any]:
    """Settings that use every part of an objective's formula."""
    if name in ("dpo", "cpo"):
        return {"label_smoothing": 0.1}
    if name == "kto":
        return {"desirable_weight": 0.7, "undesirable_weight": 1.3}
    if name in ("simpo", "orpo"):
        return {}
    extra = {"max_length": 9} if name == "dr_grpo" else {}
    return {"beta": 0.05, "entropy_weight": 0.02, "epsilon_low": 0.2, **extra}


def scores(x: Tensor, w: Tensor, b: Tensor | None, y: Tensor, options: LossOptions, t: float) -> tuple[Tensor, Tensor]:
    z = x @ w.t() if b is None else x @ w.t() + b
    z = z * options.logit_scale / t
    if options.softcap is not None:
        z = options.softcap * torch.tanh(z / options.softcap)
    log_p = z.log_softmax(-1)
    own = log_p.gather(-1, y.clamp(min=0)[..., None])[..., 0]
    return torch.where(y == -100, 0.0, own), torch.where(y == -100, 0.0, -(log_p.exp() * log_p).sum(-1))


def data_of(name: str, log_probs: Tensor) -> dict[str, Tensor]:
    """Constants near the policy's own log-probabilities, so that some ratios are clipped and others are not."""
    sequences = len(log_probs)
    near = [(log_probs + 0.4 * torch.randn_like(log_probs)).float() for _ in range(2)]
    if name == "dpo":
        return {"ref_log_probs": near[0]}
    if name == "kto":
        desirable = torch.rand(sequences, device=log_probs.device) < 0.5
        return {
            "ref_log_probs": near[0].sum(-1),
            "desirable": desirable,
            "kl": torch.tensor([0.3], device=log_probs.device),
        }
    if name in ("cpo", "simpo", "orpo"):
        return {}
    advantages = torch.randn(sequences, device=log_probs.device)
    ratio = torch.rand(log_probs.shape, device=log_probs.device)
    return {"advantages": advantages, "old_log_probs": near[0], "ref_log_probs": near[1], "sampling_ratio": ratio}


@pytest.mark.parametrize("name", PRESETS)
def test_objectives_and_their_gradients(name: str, device: torch.device) -> None:
    """Drawn shapes, masks and options; chunks of some groups, of all, or too few tokens for one, and LoRA's factors."""
    draw = random.Random(name)
    of = objective(name, **settings_of(name))
    sequences, positions = 2 * draw.randint(1, 2), draw.randint(3, 7)
    x = torch.randn(sequences, positions, HIDDEN, device=device)
    w = 2 * HIDDEN**-0.5 * torch.randn(VOCAB, HIDDEN, device=device)
    b = torch.randn(VOCAB, device=device) if draw.random() < 0.5 else None
    y = torch.randint(0, VOCAB, (sequences, positions), device=device)
    y[torch.rand(y.shape, device=device) < 0.3] = -100
    y[:, 0] = -100
    options = LossOptions(softcap=draw.choice([None, 4.0]), logit_scale=1.2)
    t = draw.choice([1.0, 0.7])
    wide = leaves(*(value.double() for value in (x, w)), *([] if b is None else [b.double()]))
    own, entropy = scores(wide[0], wide[1], wide[2] if b is not None else None, y, options, t)
    data = data_of(name, own.detach())
    mask, exact_data = y != -100, {key: v.double() if v.is_floating_point() else v for key, v in data.items()}
    if name == "kto":
        exact_data["kl"] = exact_data["kl"].expand(sequences)
    of_entropy = {"entropy": entropy} if of.needs_entropy else {}
    exact, metrics = of(own, mask, **of_entropy, **of.prepare(mask, exact_data))
    truth = [exact, *torch.autograd.grad(3 * exact, wide)]
    for budget in (SMALLEST, "balanced"):
        given = leaves(x, w, *([] if b is None else [b]))
        plain = dataclasses.replace(options, budget=budget)
        found = linear_objective(of, given[0], given[1], y, plain, *given[2:], temperature=t, **data)
        got = [found.loss, *torch.autograd.grad(3 * found.loss, given)]
        errors = [relative_error(value, right) for value, right in zip(got, truth, strict=True)]
        assert max(errors) < TOLERANCE, (budget, errors)
        assert relative_error(found.log_probs, own) < TOLERANCE
        assert found.metrics.keys() == metrics.keys()


def test_backward_computes_logits_again_where_a_pair_does_not_fit(device: torch.device) -> None:
    x, w = torch.randn(2, 12, HIDDEN, device=device), torch.randn(VOCAB, HIDDEN, device=device)
    y, ref = torch.randint(0, VOCAB, (2, 13), device=device), torch.randn(2, device=device)
    found = []
    for options in (LossOptions(), LossOptions(budget=SMALLEST)):
        given = leaves(x, w)
        hidden = torch.nn.functional.pad(given[0], (0, 0, 0, 1))
        out = linear_objective("dpo", hidden, given[1], y, dataclasses.replace(options, shift=True), ref_log_probs=ref)
        found.append((out.loss.grad_fn.name(), out.loss, *torch.autograd.grad(out.loss, given)))
    assert [row[0] for row in found] == ["ChunkedLossBackward", found[1][0]]
    assert found[1][0] != "ChunkedLossBackward"
    for one, other in zip(found[0][1:], found[1][1:], strict=True):
        assert relative_error(one, other) < TOLERANCE


def test_reference_in_the_same_call_low_rank_heads_and_frozen_weights(device: torch.device) -> None:
    x, w = torch.randn(4, 5, HIDDEN, device=device), torch.randn(VOCAB, HIDDEN, device=device)
    thin, wide = torch.randn(4, 5, 3, device=device), torch.randn(VOCAB, 3, device=device)
    y = torch.randint(0, VOCAB, (4, 5), device=device)
    given = leaves(x, thin, wide)
    out = linear_objective("dpo", given[0], w, y, low_rank=(given[1], given[2]), reference=(x, w))
    exact = leaves(x.double(), thin.double(), wide.double())
    z = exact[0] @ w.double().t() + exact[1] @ exact[2].t()
    own = z.log_softmax(-1).gather(-1, y[..., None])[..., 0].sum(-1)
    ref = (x.double() @ w.double().t()).log_softmax(-1).gather(-1, y[..., None])[..., 0].sum(-1)
    margin = 0.1 * ((own - ref)[:2] - (own - ref)[2:])
    truth = -logsigmoid(margin).mean()
    assert relative_error(out.loss, truth) < TOLERANCE
    assert relative_error(out.metrics["rewards"], 0.1 * (own - ref)) < TOLERANCE
    grads = zip(torch.autograd.grad(out.loss, given), torch.autograd.grad(truth, exact), strict=True)
    assert max(relative_error(a, b) for a, b in grads) < TOLERANCE


def test_pair_losses_are_the_published_ones() -> None:
    """Written with probabilities instead of log-probabilities where the papers do so."""
    torch.manual_seed(0)
    chosen, rejected = torch.randn(2, 5, dtype=torch.float64)
    b, e = 0.3, 0.1
    margin = b * (chosen - rejected)
    p, q = torch.sigmoid(margin), torch.sigmoid(-margin)
    u = torch.sigmoid(margin / 0.05)
    expected = {
        "sigmoid": -(1 - e) * p.log() - e * q.log(),
        "hinge": torch.clamp(1 - margin, min=0),
        "ipo": (chosen - rejected - 1 / (2 * b)) ** 2,
        "robust": (-(1 - e) * p.log() + e * q.log()) / (1 - 2 * e),
        "exo_pair": p * (p / (1 - e)).log() + q * (q / e).log(),
        "nca_pair": -torch.sigmoid(b * chosen).log()
        - 0.5 * torch.sigmoid(-b * chosen).log()
        - 0.5 * torch.sigmoid(-b * rejected).log(),
        "bco_pair": -torch.sigmoid(b * chosen).log() - torch.sigmoid(-b * rejected).log(),
        "sppo_hard": (chosen - 0.5 / b) ** 2 + (rejected + 0.5 / b) ** 2,
        "apo_zero": 1 - torch.sigmoid(b * chosen) + torch.sigmoid(b * rejected),
        "apo_down": torch.sigmoid(b * chosen) + 1 - torch.sigmoid(margin),
        "discopop": -p.log() * (1 - u) + torch.exp(-margin) * u,
    }
    assert {*expected, "odds"} == set(PAIR_LOSSES)
    for name, truth in expected.items():
        found = PAIR_LOSSES[name](chosen, rejected, PreferenceObjective(loss_type=name, beta=b, label_smoothing=e))
        assert relative_error(found, truth) < 1e-12, name
    chosen, rejected = -chosen.abs(), -rejected.abs()
    odds = [score.exp() / (1 - score.exp()) for score in (chosen, rejected)]
    found = PAIR_LOSSES["odds"](chosen, rejected, PreferenceObjective(loss_type="odds", beta=b))
    assert relative_error(found, -b * torch.sigmoid((odds[0] / odds[1]).log()).log()) < 1e-12


def test_policy_losses_are_the_published_ones() -> None:
    torch.manual_seed(0)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]).bool()
    own, old, ref = (torch.randn(3, 2, 4, dtype=torch.float64) * 0.3).unbind()
    advantages = torch.tensor([1.5, -0.5], dtype=torch.float64)
    a = advantages[:, None]

    def loss(name: str, **settings: Any) -> Tensor:
        of = objective(name, epsilon_low=0.1, epsilon_high=0.2, **settings)
        data = {"advantages": advantages, "old_log_probs": old, "ref_log_probs": ref}
        return of(own, mask, **of.prepare(mask, data))[0]

    def clipped(ratio: Tensor) -> Tensor:
        return -torch.min(ratio * a, ratio.clamp(0.9, 1.2) * a)

    ratio = (own - old).exp()
    tokens = clipped(ratio) * mask
    per_sequence = tokens.sum(-1) / mask.sum(-1)
    kl = {"k1": own - ref, "k2": (own - ref) ** 2 / 2, "k3": (ref - own).exp() - 1 - (ref - own)}
    mean_ratio = (((own - old) * mask).sum(-1) / mask.sum(-1)).exp()[:, None]
    expected = {
        loss("grpo"): per_sequence.mean(),
        loss("bnpo"): tokens.sum() / 5,
        loss("dapo"): tokens.sum() / 5,
        loss("dr_grpo", max_length=9): tokens.sum() / 18,
        loss("gspo"): clipped(mean_ratio).mean(),
        loss("cispo"): -(ratio.clamp(max=0.2) * a * own * mask).sum() / 5,
        loss("bnpo", delta=1.1): -(torch.min(ratio.clamp(max=1.1) * a, ratio.clamp(0.9, 1.2) * a) * mask).sum() / 5,
        **{loss("bnpo", beta=0.5, kl=name): (tokens + 0.5 * one * mask).sum() / 5 for name, one in kl.items()},
        loss("bnpo", beta=0.5, corrects_kl=True): (tokens + 0.5 * kl["k3"] * ratio * mask).sum() / 5,
    }
    for found, truth in expected.items():
        assert relative_error(found, truth) < 1e-6


def test_the_workspace_bounds_the_memory() -> None:
    """Beyond the gradients, the fused loss holds one chunk of logits and some numbers per token."""
    sequences, positions, vocab = 8, 8, 4096
    x = torch.randn(sequences, positions, 8).requires_grad_()
    w = torch.randn(vocab, 8).requires_grad_()
    y = torch.randint(0, vocab, (sequences, positions))
    budget = 2 * positions * vocab * 4
    data = {"advantages": torch.randn(sequences), "old_log_probs": -torch.rand(sequences, positions)}
    for name, given in (("grpo", data), ("dpo", {"ref_log_probs": torch.randn(sequences)})):
        with ByteMeter((x, w, y, *given.values())) as meter:
            linear_objective(name, x, w, y, LossOptions(budget=budget), **given)
        beyond = meter.peak_bytes - x.nbytes - w.nbytes
        assert budget <= beyond < budget + 200 * y.numel()


def test_wrong_calls_are_errors_of_one_line() -> None:
    x, w, y = torch.randn(3, 2, HIDDEN), torch.randn(VOCAB, HIDDEN), torch.zeros(3, 2, dtype=torch.int64)
    calls = {
        "3 sequences": lambda: linear_objective("dpo", x, w, y),
        "needs advantages": lambda: linear_objective("grpo", x, w, y),
        "has the shape": lambda: linear_objective("kto", x, w, y, desirable=torch.ones(2)),
        "unknown objective 'dop'. Did you mean": lambda: linear_objective("dop", x, w, y),
        "no kl 'k4'": lambda: objective("grpo", kl="k4"),
        "needs max_length": lambda: objective("dr_grpo"),
        "unexpected keyword": lambda: objective("dpo", betta=1),
        "label smoothing": lambda: objective("dpo", loss_type="exo_pair"),
    }
    for text, call in calls.items():
        with pytest.raises((KernelInputError, RecipeError), match=text) as error:
            call()
        assert "\n" not in str(error.value)
    assert math.isfinite(linear_objective("kto", x, w, y, desirable=torch.ones(3)).loss)
