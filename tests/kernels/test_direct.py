"""Loss, log-sum-exp and gradient from one launch, against plain torch in fp64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ligerprof.errors import KernelInputError
from ligerprof.kernels.options import LossOptions
from tests.kernels.oracle import LOSS_ROUNDINGS, relative_error
from tests.sampling import sampled

VOCAB, SHAPE = 203, (3, 7)


def problem(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    logits = (2 * torch.randn(*SHAPE, VOCAB, device=device)).to(dtype)
    labels = torch.randint(0, VOCAB, SHAPE, device=device)
    labels.view(-1)[::4] = -100
    return logits, labels, torch.rand(VOCAB, device=device)


def truth(logits: Tensor, labels: Tensor, weight: Tensor, reduction: str, grads: Tensor) -> tuple[Tensor, Tensor]:
    wide = logits.detach().cpu().double().requires_grad_()
    loss = functional.cross_entropy(
        wide.view(-1, VOCAB), labels.cpu().view(-1), weight.cpu().double(), reduction=reduction
    )
    (grad,) = torch.autograd.grad(loss, wide, grads.cpu().double().view(loss.shape))
    return loss, grad


@sampled("in_place", [False, True], every=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_loss_and_gradient(reduction: str, dtype: torch.dtype, in_place: bool, device: torch.device) -> None:
    from ligerprof.kernels.cross_entropy.direct import cross_entropy_and_gradient

    logits, labels, weight = problem(device, dtype)
    ones = torch.ones(SHAPE if reduction == "none" else ())
    expected, expected_grad = truth(logits, labels, weight, reduction, ones)
    lse = torch.logsumexp(logits.double(), -1) * (labels != -100)
    version = logits._version
    options = LossOptions(reduction=reduction, in_place=in_place)
    found = cross_entropy_and_gradient(logits, labels, options, weight)
    assert (found.gradient is logits) == in_place == (logits._version > version)
    assert relative_error(found.loss.view(-1), expected.view(-1)) < LOSS_ROUNDINGS[torch.float32]
    assert relative_error(found.lse, lse) < LOSS_ROUNDINGS[torch.float32]
    assert found.gradient.dtype == dtype
    assert relative_error(found.gradient, expected_grad) < LOSS_ROUNDINGS[dtype]


@pytest.mark.parametrize("in_place", [False, True])
def test_gradient_from_the_losses_gradients(in_place: bool, device: torch.device) -> None:
    from ligerprof.kernels.cross_entropy.direct import cross_entropy_gradient

    for grads in (torch.randn(SHAPE, device=device), torch.ones((), device=device).expand(SHAPE)):
        logits, labels, weight = problem(device, torch.float32)
        _, expected = truth(logits, labels, weight, "none", grads)
        found = cross_entropy_gradient(logits, labels, grads, LossOptions(in_place=in_place), weight)
        assert (found is logits) == in_place
        assert relative_error(found, expected) < LOSS_ROUNDINGS[torch.float32]


# rows of this width are read in pairs, if they are aligned
WIDE = 65536 + 16
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda logits: logits,
    "gaps": lambda logits: functional.pad(logits, (0, 16))[..., : logits.shape[-1]],
    "transposed": lambda logits: logits.transpose(0, 1).contiguous().transpose(0, 1),
    "expanded": lambda logits: logits[:, :1].expand_as(logits),
}


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
@sampled("in_place", [False, True], every=2)
@pytest.mark.parametrize(
    ("layout", "vocab", "dtype"),
    [*((layout, VOCAB, torch.float32) for layout in LAYOUTS), ("gaps", WIDE, torch.bfloat16)],
)
def test_both_calls_trace_into_one_graph(
    layout: str, vocab: int, dtype: torch.dtype, in_place: bool, backend: str, device: torch.device
) -> None:
    """They overwrite what they overwrite without torch.compile, with the same values."""
    from ligerprof.kernels.cross_entropy.direct import cross_entropy_and_gradient, cross_entropy_gradient

    if backend == "inductor" and device.type == "cpu":
        pytest.skip("inductor cannot compile for the interpreter")
    options = LossOptions(in_place=in_place, reduction="none")

    def both(given: list[Tensor], labels: Tensor, grads: Tensor) -> tuple[Tensor, ...]:
        third = cross_entropy_gradient(given[1], labels, grads, options)
        return *cross_entropy_and_gradient(given[0], labels, options), third

    torch.compiler.reset()
    logits, grads = torch.randn(2, 2, vocab, device=device).to(dtype), torch.randn(2, 2, device=device)
    labels = torch.randint(0, vocab, (2, 2), device=device)
    labels[0, 1] = -100
    eager, traced = ([LAYOUTS[layout](logits.clone()) for _ in range(2)] for _ in range(2))
    expected = both(eager, labels, grads)
    versions = [given._version for given in traced]
    found = torch.compile(both, backend=backend, fullgraph=True)(traced, labels, grads)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    overwrites = in_place and layout in ("dense", "gaps")
    for given, place in ((0, 2), (1, 3)):
        assert (expected[place] is eager[given]) == (found[place] is traced[given]) == overwrites
        assert (traced[given]._version > versions[given]) == overwrites
        assert overwrites or torch.equal(traced[given], LAYOUTS[layout](logits))


def test_no_tokens_strides_and_wrong_shapes(device: torch.device) -> None:
    from ligerprof.kernels.cross_entropy.direct import cross_entropy_and_gradient, cross_entropy_gradient

    in_place = LossOptions(in_place=True, reduction="none")
    logits, labels = torch.empty(0, VOCAB, device=device), torch.empty(0, dtype=torch.int64, device=device)
    found = cross_entropy_and_gradient(logits, labels, in_place)
    assert (found.loss.shape, found.lse.shape, found.gradient.shape) == ((0,), (0,), (0, VOCAB))
    logits, labels, weight = problem(device, torch.float32)
    # neither transposed nor expanded logits can be overwritten as rows
    transposed = logits.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    for given in (transposed, logits[:1].expand_as(logits)):
        before = given.clone()
        _, expected = truth(given, labels, weight, "none", torch.ones(SHAPE))
        found = cross_entropy_and_gradient(given, labels, in_place, weight)
        assert torch.equal(given, before)
        assert relative_error(found.gradient, expected) < LOSS_ROUNDINGS[torch.float32]
    with pytest.raises(KernelInputError, match="one label per row"):
        cross_entropy_and_gradient(logits, labels[:1])
    with pytest.raises(KernelInputError, match="one gradient per label"):
        cross_entropy_gradient(logits, labels, torch.ones((), device=device))
