"""Cross-entropy over given logits against its reference in fp64."""

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerprof.errors import KernelInputError, RecipeError
from ligerprof.kernels.cross_entropy.reference import cross_entropy as reference
from ligerprof.kernels.options import PLAIN_LOSS, LossOptions
from tests.kernels.oracle import DTYPES, LOSS_ROUNDINGS, assert_matches_fp64, relative_error, run
from tests.sampling import sampled

VOCAB = 1009
OPTIONS = {
    "mean": LossOptions(),
    "sum": LossOptions(reduction="sum"),
    "none": LossOptions(reduction="none"),
    "shift": LossOptions(shift=True),
    "shift-none": LossOptions(shift=True, reduction="none"),
    "ignore-7": LossOptions(ignore_index=7),
    "smoothing": LossOptions(label_smoothing=0.1),
    "only-smoothing": LossOptions(label_smoothing=1.0),
    "z-loss": LossOptions(z_loss=1e-2),
    "z-loss-none": LossOptions(z_loss=1e-2, reduction="none"),
    "softcap": LossOptions(softcap=3.0),
    "scale": LossOptions(logit_scale=0.25),
    "everything": LossOptions(shift=True, label_smoothing=0.2, z_loss=1e-3, softcap=4.0, logit_scale=1.5),
}


# options that class weights take part in
WEIGHTED = ("mean", "sum", "none", "shift", "ignore-7", "smoothing", "z-loss", "z-loss-none", "softcap", "everything")


def kernel(
    logits: Tensor,
    labels: Tensor,
    options: LossOptions = PLAIN_LOSS,
    num_items: Any = None,
    class_weight: Tensor | None = None,
) -> Tensor:
    from ligerprof.kernels.cross_entropy.triton import cross_entropy

    # a loss in place eats its leaf
    given = logits.clone() if options.in_place else logits
    return cross_entropy(given, labels, options, num_items, class_weight)


def logits_and_labels(device: torch.device, dtype: torch.dtype = torch.float32, vocab: int = VOCAB) -> list[Tensor]:
    logits = (2 * torch.randn(3, 5, vocab, device=device)).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (3, 5), device=device)
    labels[0, 1:4] = -100
    labels[2, 0] = 7
    return [logits, labels]


@pytest.mark.parametrize("in_place", [False, True], ids=["out-of-place", "in-place"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_fp64(dtype: torch.dtype, in_place: bool, device: torch.device) -> None:
    options = LossOptions(in_place=in_place)
    inputs, grad = logits_and_labels(device, dtype), torch.tensor(3.5, device=device)
    tolerance = LOSS_ROUNDINGS[dtype]
    assert_matches_fp64(lambda *g: kernel(*g, options), lambda *g: reference(*g, options), inputs, tolerance, [grad])


@sampled("in_place", [False, True], ids=["out-of-place", "in-place"], every=2)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_matches_fp64(name: str, in_place: bool, device: torch.device) -> None:
    options = dataclasses.replace(OPTIONS[name], in_place=in_place)
    inputs = logits_and_labels(device)
    inputs[1][inputs[1] == -100] = options.ignore_index
    grads = [torch.rand(3, 5, device=device)] if options.reduction == "none" else None
    tolerance = LOSS_ROUNDINGS[torch.float32]
    assert_matches_fp64(lambda *g: kernel(*g, options), lambda *g: reference(*g, options), inputs, tolerance, grads)


@sampled("name", WEIGHTED, every=2)
def test_class_weights(name: str, device: torch.device) -> None:
    options, (logits, labels) = OPTIONS[name], logits_and_labels(device)
    labels[labels == -100] = options.ignore_index
    grads = [torch.rand(3, 5, device=device)] if options.reduction == "none" else None
    assert_matches_fp64(
        lambda x, y, w: kernel(x, y, options, class_weight=w),
        lambda x, y, w: reference(x, y, options, class_weight=w),
        [logits, labels, 2 * torch.rand(VOCAB, device=device)],
        LOSS_ROUNDINGS[torch.float32],
        grads,
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_class_weights_do_not_apply_to_the_z_loss(reduction: str, device: torch.device) -> None:
    """liger-kernel's formula: a mean divides the z-loss by the number of labels, the loss by the sum of weights."""

    def formula(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        words, targets = logits.flatten(0, 1), labels.flatten()
        losses = torch.nn.functional.cross_entropy(words, targets, weights.to(words), reduction=reduction)
        squares = 0.3 * words.logsumexp(-1).square() * (targets != -100)
        if reduction == "none":
            return (losses + squares).view(labels.shape)
        return losses + squares.sum() / ((targets != -100).sum() if reduction == "mean" else 1)

    options = LossOptions(z_loss=0.3, reduction=reduction)
    inputs = [*logits_and_labels(device), torch.arange(VOCAB, device=device) / 100]
    grads = [torch.rand(3, 5, device=device)] if reduction == "none" else None
    for function in (kernel, reference):
        call = partial(function, options=options)
        assert_matches_fp64(
            lambda x, y, w, call=call: call(x, y, class_weight=w), formula, inputs, LOSS_ROUNDINGS[torch.float32], grads
        )


@pytest.mark.parametrize("items", [6, 2.5, torch.tensor(4), torch.tensor([2.5])], ids=str)
def test_divisor_given_instead_of_counted(items: Any, device: torch.device) -> None:
    inputs = logits_and_labels(device)
    here = items.to(device) if isinstance(items, Tensor) else items
    there = items.item() if isinstance(items, Tensor) else items
    assert_matches_fp64(
        lambda *g: kernel(*g, num_items=here),
        lambda *g: reference(*g, num_items=there),
        inputs,
        LOSS_ROUNDINGS[torch.float32],
    )


def test_no_label_counts(device: torch.device) -> None:
    logits, labels = logits_and_labels(device)
    loss, grad = run(kernel, [logits, torch.full_like(labels, -100)])
    assert loss.item() == 0.0
    assert not grad.any()


def test_a_label_outside_the_vocabulary_poisons_its_own_row(device: torch.device) -> None:
    logits, labels = logits_and_labels(device)
    labels[1, 2] = VOCAB
    labels[2, 4] = -1
    options = LossOptions(reduction="none", check_labels=False)
    loss, grad = run(lambda *g: kernel(*g, options), [logits, labels])
    poisoned = torch.zeros(3, 5, dtype=torch.bool, device=device)
    poisoned[1, 2] = poisoned[2, 4] = True
    assert torch.equal(loss.isnan(), poisoned)
    assert torch.equal(grad.isnan().all(-1), poisoned)
    assert torch.equal(grad.isnan().any(-1), poisoned)


def test_logits_masked_by_minus_infinity(device: torch.device) -> None:
    """A whole block of the vocabulary may be ruled out."""
    logits = torch.randn(2, 20000, device=device)
    logits[:, :17000] = float("-inf")
    labels = torch.tensor([18000, 19999], device=device)
    assert_matches_fp64(kernel, reference, [logits.requires_grad_(), labels], LOSS_ROUNDINGS[torch.float32])


@pytest.mark.parametrize("in_place", [False, True], ids=["out-of-place", "in-place"])
def test_strided_logits(in_place: bool, device: torch.device) -> None:
    wide = torch.randn(4, 6, VOCAB + 3, device=device)
    options = LossOptions(in_place=in_place)
    inputs = [wide[:, :-1, :VOCAB].requires_grad_(), torch.randint(0, VOCAB, (4, 5), device=device)]
    tolerance = LOSS_ROUNDINGS[torch.float32]
    assert_matches_fp64(lambda *g: kernel(*g, options), lambda *g: reference(*g, options), inputs, tolerance)


@pytest.mark.parametrize("vocab", [1, VOCAB])
def test_a_scaled_loss_in_place_leaves_the_padding_of_the_vocabulary_alone(vocab: int, device: torch.device) -> None:
    from ligerprof.kernels.cross_entropy.triton import cross_entropy

    leaf = torch.randn(4, 6, vocab + 3, device=device, requires_grad=True)
    padded, labels = leaf.clone(), torch.randint(0, vocab, (4, 6), device=device)
    padding, factor = padded[..., vocab:].detach().clone(), torch.tensor(2.5, device=device)
    loss = cross_entropy(padded[..., :vocab], labels, LossOptions(in_place=True))
    for retain in (True, False):
        (found,) = torch.autograd.grad(loss, leaf, factor, retain_graph=retain)
        (expected,) = torch.autograd.grad(reference(leaf[..., :vocab], labels), leaf, factor)
        assert relative_error(found, expected) < LOSS_ROUNDINGS[torch.float32]
    assert torch.equal(padded[..., vocab:], padding)


def test_the_reference_takes_the_inputs_that_the_kernel_takes(device: torch.device) -> None:
    logits = torch.randn(5, 3, 33, device=device).transpose(0, 1).requires_grad_()
    labels = torch.randint(0, 33, (5, 3), device=device, dtype=torch.int32).t()
    weights = torch.rand(33, device=device).bfloat16()
    for options in (LossOptions(token_scaling=True, z_loss=0.1), LossOptions(reduction="none", label_smoothing=0.1)):
        got, right = (
            run(partial(function, options=options, class_weight=weights), [logits, labels])
            for function in (kernel, reference)
        )
        errors = [relative_error(*pair) for pair in zip(got, right, strict=True)]
        assert max(errors) < LOSS_ROUNDINGS[torch.float32], errors


def test_in_place_takes_no_second_plane_and_says_so(device: torch.device) -> None:
    from ligerprof.kernels.cross_entropy.triton import cross_entropy

    logits, labels = logits_and_labels(device)
    given = logits.clone()
    doubled = given * given
    loss = cross_entropy(given, labels, LossOptions(in_place=True))
    (grad,) = torch.autograd.grad(loss, logits, retain_graph=True)
    assert relative_error(given, grad) == 0.0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        doubled.sum().backward()


def test_evaluation_leaves_the_logits_alone(device: torch.device) -> None:
    from ligerprof.kernels.cross_entropy.triton import cross_entropy

    logits, labels = logits_and_labels(device)
    before = logits.detach().clone()
    with torch.no_grad():
        loss = cross_entropy(logits, labels, LossOptions(in_place=True))
    assert torch.equal(logits, before)
    assert relative_error(loss, reference(before, labels)) < LOSS_ROUNDINGS[torch.float32]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("in_place", [False, True], ids=["out-of-place", "in-place"])
def test_a_kept_graph_gives_the_same_gradient_twice(reduction: str, in_place: bool, device: torch.device) -> None:
    logits, labels = logits_and_labels(device)
    loss = kernel(logits, labels, LossOptions(reduction=reduction, in_place=in_place)).sum()
    factor = torch.tensor(2.0, device=device)
    (first,) = torch.autograd.grad(loss, logits, factor, retain_graph=True)
    (second,) = torch.autograd.grad(loss, logits, factor, retain_graph=True)
    (last,) = torch.autograd.grad(loss, logits, factor)
    assert torch.equal(first, second)
    assert torch.equal(first, last)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, logits)


def test_fp16_gradients_survive_a_loss_scale(device: torch.device) -> None:
    """A probability over the token count is below fp16's smallest number; times the loss scale it is not."""
    logits = torch.zeros(64, VOCAB, dtype=torch.float16, device=device, requires_grad=True)
    labels = torch.zeros(64, dtype=torch.int64, device=device)
    scale = torch.tensor(65536.0, device=device)
    assert_matches_fp64(kernel, reference, [logits, labels], LOSS_ROUNDINGS[torch.float16], [scale])


def test_shapes_and_options_that_make_no_sense_are_refused(device: torch.device) -> None:
    logits, labels = logits_and_labels(device)
    with pytest.raises(KernelInputError, match="one label per row"):
        kernel(logits, labels[:, :-1])
    with pytest.raises(KernelInputError, match="one weight per word"):
        kernel(logits, labels, class_weight=torch.ones(VOCAB - 1, device=device))
    infinite = float("inf")
    wrong: list[dict[str, Any]] = [{"reduction": "max"}, {"label_smoothing": 1.1}, {"softcap": 0.0}]
    wrong += [{"logit_scale": 0.0}, {"logit_scale": infinite}, {"z_loss": -0.1}, {"z_loss": infinite}]
    for options in wrong:
        with pytest.raises(RecipeError):
            LossOptions(**options)
