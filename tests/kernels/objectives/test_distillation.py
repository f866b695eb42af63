"""Distillation losses against plain torch on all logits, in fp64."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from ligerprof.errors import KernelInputError
from ligerprof.kernels.objectives import distillation_loss, topk_distillation_loss
from ligerprof.kernels.options import LossOptions
from tests.kernels.oracle import LOSS_ROUNDINGS, leaves, relative_error
from tests.sampling import sampled

VOCAB, HIDDEN, TEACHER, SHAPE = 150, 24, 16, (2, 5)
TOLERANCE = 5 * LOSS_ROUNDINGS[torch.float32]


def exact_divergence(s: Tensor, t: Tensor, beta: float) -> Tensor:
    """By torch's own divergence of two distributions, from log-probabilities."""

    def relative(one: Tensor, other: Tensor) -> Tensor:
        return kl_div(other, one, reduction="none", log_target=True).sum(-1)

    if beta in (0, 1):
        return relative(t, s) if beta == 0 else relative(s, t)
    mixture = ((1 - beta) * s.exp() + beta * t.exp()).log()
    return beta * relative(t, mixture) + (1 - beta) * relative(s, mixture)


def problem(device: torch.device) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Student's and teacher's hidden states, weight and bias, and labels."""
    x, t = torch.randn(*SHAPE, HIDDEN, device=device), torch.randn(*SHAPE, TEACHER, device=device)
    w, u = torch.randn(VOCAB, HIDDEN, device=device) * 0.4, torch.randn(VOCAB, TEACHER, device=device) * 0.5
    b, c = torch.randn(2, VOCAB, device=device)
    y = torch.randint(0, VOCAB, SHAPE, device=device)
    y[0, 3] = -100
    return [x, w, b], [t, u, c], y


def capped(z: Tensor, options: LossOptions) -> Tensor:
    z = z * options.logit_scale
    return z if options.softcap is None else options.softcap * torch.tanh(z / options.softcap)


@sampled("softcap", [3.0, None], every=2)
@pytest.mark.parametrize(("beta", "hard"), [(0.0, 0.0), (0.0, 0.5), (1.0, 0.0), (0.3, 0.5)])
def test_divergences(beta: float, hard: float, softcap: float | None, device: torch.device) -> None:
    student, (t, u, c), y = problem(device)
    options = LossOptions(budget=2 * 16 * 160 * 4, softcap=softcap, logit_scale=1.2)
    settings = {"beta": beta, "temperature": 1.7, "soft_weight": 0.8, "hard_weight": hard}
    x, w, b = leaves(*student)
    found = distillation_loss(x, w, t, u, y, options, b, c, teacher_options=LossOptions(), **settings)
    got = [found.loss, *torch.autograd.grad(2 * found.loss, (x, w, b))]
    x, w, b = leaves(*(value.double() for value in student))
    z = capped(x @ w.t() + b, options)
    of_teacher = t.double() @ u.double().t() + c
    tokens = exact_divergence((z / 1.7).log_softmax(-1), (of_teacher / 1.7).log_softmax(-1), beta)
    soft = tokens[y != -100].mean()
    loss = 0.8 * soft + hard * cross_entropy(z.view(-1, VOCAB), y.view(-1))
    truth = [loss, *torch.autograd.grad(2 * loss, (x, w, b))]
    assert max(relative_error(a, b) for a, b in zip(got, truth, strict=True)) < TOLERANCE
    assert relative_error(found.soft_loss, soft) < TOLERANCE
    assert (found.hard_loss is None) == (hard == 0)


@sampled("tail", [True, False], every=2)
@pytest.mark.parametrize(("beta", "softcap"), [(0.0, None), (1.0, 3.0), (0.5, None)])
def test_top_words_of_a_teacher(beta: float, softcap: float | None, tail: bool, device: torch.device) -> None:
    student, (t, u, c), y = problem(device)
    options = LossOptions(budget=16 * 160 * 4, softcap=softcap)
    log_q, words = (t @ u.t() + c).log_softmax(-1).topk(5, -1)
    x, w, b = leaves(*student)
    found = topk_distillation_loss(x, w, log_q, words, y, options, b, beta=beta, temperature=1.3, tail=tail)
    got = [found, *torch.autograd.grad(2 * found, (x, w, b))]
    x, w, b = leaves(*(value.double() for value in student))
    p = capped((x @ w.t() + b) / 1.3, options).softmax(-1).gather(-1, words)
    p, q = ([one, 1 - one.sum(-1, keepdim=True)] if tail else [one] for one in (p, log_q.double().exp()))
    p, q = torch.cat(p, -1), torch.cat(q, -1)
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    loss = exact_divergence(p.log(), q.log(), beta)[y != -100].mean()
    truth = [loss, *torch.autograd.grad(2 * loss, (x, w, b))]
    assert max(relative_error(a, b) for a, b in zip(got, truth, strict=True)) < TOLERANCE


def test_a_teacher_like_the_student_has_no_divergence_and_no_gradient(device: torch.device) -> None:
    student, _, y = problem(device)
    x, w = leaves(*student[:2])
    for beta in (0.0, 0.5, 1.0):
        found = distillation_loss(x, w, x, w, y, beta=beta)
        grads = torch.autograd.grad(found.loss, (x, w))
        assert max(value.abs().max().item() for value in (found.loss, *grads)) < 1e-6


def test_shapes_that_do_not_match_are_errors() -> None:
    x, w, y = torch.randn(2, 3, 8), torch.randn(20, 8), torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(KernelInputError, match="has 20 words and the teacher 30"):
        distillation_loss(x, w, x, torch.randn(30, 8), y)
    with pytest.raises(KernelInputError, match=r"beta is 1\.5"):
        distillation_loss(x, w, x, w, y, beta=1.5)
    with pytest.raises(KernelInputError, match=r"Give \[\.\.\., K\] of each"):
        topk_distillation_loss(x, w, torch.zeros(2, 3, 4), torch.zeros(2, 4, dtype=torch.int64), y)
    with pytest.raises(KernelInputError, match="Use bf16 or fp32"):
        distillation_loss(x.half(), w.half(), x.half(), w.half(), y)


@pytest.mark.parametrize("beta", [0.0, 0.01, 0.5, 0.99, 1.0])
def test_a_teacher_far_from_the_student(beta: float, device: torch.device) -> None:
    # logits: probabilities of words that the other finds likely are as small as e^-200
    x, t = 40 * torch.randn(2, 4, 30, device=device), 40 * torch.randn(2, 4, 30, device=device)
    head, y = torch.eye(30, device=device), torch.zeros(2, 4, dtype=torch.int64, device=device)
    (given,) = leaves(x)
    found = distillation_loss(given, head, t, head, y, beta=beta).loss
    (wide,) = leaves(x.double())
    exact = exact_divergence(wide.log_softmax(-1), t.double().log_softmax(-1), beta).mean()
    assert relative_error(found, exact) < 1e-5
    got, truth = (torch.autograd.grad(loss, leaf)[0].double() for loss, leaf in ((found, given), (exact, wide)))
    # some gradients are differences of logarithms that are far larger
    assert (got - truth).abs().max() < 1e-5
