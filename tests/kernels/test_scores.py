"""Log-probabilities, entropies, log-sum-exps and label logits of a head, against plain torch in fp64."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ligerprof.errors import KernelInputError
from ligerprof.kernels.options import LossOptions
from tests.kernels.oracle import LOSS_ROUNDINGS, assert_matches_fp64, leaves, relative_error
from tests.sampling import sampled

VOCAB, HIDDEN, SHAPE = 150, 24, (2, 6)
FP32 = 2 * LOSS_ROUNDINGS[torch.float32]


def problem(device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    states = torch.randn(*SHAPE, HIDDEN, device=device).to(dtype)
    weight = (2 * HIDDEN**-0.5 * torch.randn(VOCAB, HIDDEN, device=device)).to(dtype)
    labels = torch.randint(0, VOCAB, SHAPE, device=device)
    labels[0, 2] = labels[1, 0]
    labels[0, 1] = -100
    return [*leaves(states, weight, torch.randn(VOCAB, device=device).to(dtype)), labels]


def logits_of(x: Tensor, w: Tensor, b: Tensor, options: LossOptions) -> Tensor:
    z = (x @ w.t() + b) * options.logit_scale
    return z if options.softcap is None else options.softcap * torch.tanh(z / options.softcap)


def test_log_probs_and_entropies_at_a_temperature(device: torch.device) -> None:
    from ligerprof.kernels.linear_cross_entropy import scores

    options = LossOptions(budget=16 * 160 * 4)

    def expected(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        log_p = torch.log_softmax((x @ w.t() + b) / 0.7, -1)
        counts = y != -100
        entropy = -(log_p.exp() * log_p).sum(-1)
        return log_p.gather(-1, y.clamp(min=0)[..., None])[..., 0] * counts, entropy * counts

    grads = list(torch.randn(2, *SHAPE, device=device))
    assert_matches_fp64(
        lambda x, w, b, y: tuple(scores.linear_log_probs(x, w, y, options, b, temperature=0.7, entropy=True)),
        expected,
        problem(device),
        FP32,
        grads,
    )
    assert_matches_fp64(
        lambda x, w, b, y: tuple(scores.log_probs(x @ w.t() + b, y, temperature=0.7, entropy=True)),
        expected,
        problem(device),
        FP32,
        grads,
    )


def test_log_probs_of_a_policy_gradient_step(device: torch.device) -> None:
    """Positions predict the next token, as in GRPO, and the ratio to old log-probabilities weights the gradient."""
    from ligerprof.kernels.linear_cross_entropy.scores import linear_log_probs

    advantages = torch.randn(SHAPE, device=device)

    def step(log_probs: Tensor) -> Tensor:
        ratio = torch.exp(log_probs - log_probs.detach())
        return -(ratio * advantages.to(log_probs)).mean()

    def expected(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        targets = functional.pad(y, (0, 1), value=-100)[:, 1:]
        log_p = torch.log_softmax(x @ w.t(), -1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        return step(log_p * (targets != -100))

    states, weight, _, labels = problem(device)
    found = linear_log_probs(states, weight, labels, LossOptions(shift=True))
    assert found.entropy is None
    assert_matches_fp64(
        lambda x, w, y: step(linear_log_probs(x, w, y, LossOptions(shift=True)).log_probs),
        expected,
        [states, weight, labels],
        FP32,
    )


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_log_sum_exps(softcap: float | None, device: torch.device) -> None:
    from ligerprof.kernels.linear_cross_entropy.scores import linear_log_sum_exp

    options = LossOptions(softcap=softcap, logit_scale=1.3, budget=16 * 160 * 4)
    assert_matches_fp64(
        lambda x, w, b: linear_log_sum_exp(x, w, options, b),
        lambda x, w, b: torch.logsumexp(logits_of(x, w, b, options), -1),
        problem(device)[:3],
        FP32,
        [torch.randn(SHAPE, device=device)],
    )


@pytest.mark.parametrize("softcap", [None, 20.0])
@sampled("with_bias", [False, True], every=2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_log_sum_exps_of_16_bit_operands_come_from_fp32_logits(
    dtype: torch.dtype, with_bias: bool, softcap: float | None, device: torch.device
) -> None:
    """As exact as from fp32 operands, next to which logits of 16 bits are 1e-4 off."""
    from ligerprof.kernels.linear_cross_entropy.scores import linear_log_sum_exp

    options = LossOptions(softcap=softcap, budget=16 * 160 * 4)
    states, weight, bias = (value.detach() for value in problem(device, dtype)[:3])
    given = bias if with_bias else None
    expected = torch.logsumexp(logits_of(states.double(), weight.double(), bias.double() * with_bias, options), -1)
    found = linear_log_sum_exp(states.requires_grad_(), weight.requires_grad_(), options, given)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 1e-5
    grads = torch.autograd.grad(found.sum(), [states, weight])
    wide = [value.detach().double().requires_grad_() for value in (states, weight)]
    log_sums = torch.logsumexp(logits_of(*wide, bias.double() * with_bias, options), -1)
    for grad, truth in zip(grads, torch.autograd.grad(log_sums.sum(), wide), strict=True):
        assert grad.dtype == dtype
        assert relative_error(grad, truth) < LOSS_ROUNDINGS[dtype]


def test_losses_from_fp32_logits_where_nothing_overwrites_them(device: torch.device) -> None:
    """In evaluation and for log-probabilities; the low-rank factors of an adapter are added in fp32, too."""
    from ligerprof.kernels.linear_cross_entropy.scores import linear_log_probs
    from ligerprof.kernels.linear_cross_entropy.triton import fused_linear_cross_entropy

    states, weight, bias, labels = (value.detach() for value in problem(device, torch.bfloat16))
    thin, wide = torch.randn(*SHAPE, 3, device=device).bfloat16(), torch.randn(VOCAB, 3, device=device).bfloat16()
    options = LossOptions(fp32_logits=True, reduction="none")
    z = logits_of(states.double(), weight.double(), bias.double(), options)
    found = fused_linear_cross_entropy(states, weight, labels, options, bias, low_rank=(thin, wide))
    expected = functional.cross_entropy(
        (z + thin.double() @ wide.double().t()).view(-1, VOCAB), labels.view(-1), reduction="none"
    )
    assert (found.view(-1) - expected).abs().max() < 1e-5
    scored = linear_log_probs(states.requires_grad_(), weight, labels, options, bias).log_probs
    truth = -functional.cross_entropy(z.view(-1, VOCAB), labels.view(-1), reduction="none")
    assert (scored.view(-1) - truth).abs().max() < 1e-5


@pytest.mark.slow
def test_capped_label_logits_keep_the_digits_of_small_logits(device: torch.device) -> None:
    from ligerprof.kernels.linear_cross_entropy.scores import linear_label_logits

    options = LossOptions(softcap=20.0)
    words = torch.linspace(-60, 60, 4001, device=device)
    words = torch.cat((words, words * 1e-4))
    labels = torch.arange(words.numel(), device=device)
    found = linear_label_logits(torch.ones(words.numel(), 1, device=device), words[:, None], labels, options)
    expected = 20 * torch.tanh(words.double() / 20)
    assert ((found - expected) / expected.abs().clamp(min=1e-9)).abs().max() < 4e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shift", [0, 1])
@sampled("softcap", [None, 2.0], every=2)
def test_label_logits(softcap: float | None, shift: int, dtype: torch.dtype, device: torch.device) -> None:
    from ligerprof.kernels.linear_cross_entropy.scores import linear_label_logits

    options = LossOptions(softcap=softcap, logit_scale=1.3, shift=shift)

    def expected(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
        targets = functional.pad(y, (0, shift), value=-100)[:, shift:]
        picked = logits_of(x, w, b, options).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        return picked * (targets != -100)

    assert_matches_fp64(
        lambda x, w, b, y: linear_label_logits(x, w, y, options, b),
        expected,
        problem(device, dtype),
        LOSS_ROUNDINGS[dtype],
        [torch.randn(SHAPE, device=device)],
    )


def test_only_what_is_wanted_gets_a_gradient(device: torch.device) -> None:
    from ligerprof.kernels.linear_cross_entropy.scores import linear_label_logits

    for kept in range(3):
        inputs = problem(device)
        for place in range(3):
            inputs[place].requires_grad_(place == kept)
        *given, labels = inputs
        linear_label_logits(given[0], given[1], labels, bias=given[2]).sum().backward()
        assert [value.grad is not None for value in given] == [place == kept for place in range(3)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"options": LossOptions(label_smoothing=0.1)}, "label_smoothing belongs to a loss"),
        ({"options": LossOptions(z_loss=0.1)}, "z_loss belongs to a loss"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": float("inf")}, "temperature is inf"),
    ],
)
def test_what_has_no_meaning_for_a_score(wrong: dict[str, Any], message: str, device: torch.device) -> None:
    from ligerprof.kernels.linear_cross_entropy.scores import linear_log_probs

    states, weight, _, labels = problem(device)
    with pytest.raises(KernelInputError, match=message):
        linear_log_probs(states, weight, labels, **wrong)
