"""What both losses return besides the loss, with its gradients, against plain torch in fp64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerprof.errors import KernelInputError, LabelError
from ligerprof.kernels.cross_entropy.reference import cross_entropy_outputs as ce_reference
from ligerprof.kernels.linear_cross_entropy.plan import plan_chunks
from ligerprof.kernels.linear_cross_entropy.reference import fused_linear_cross_entropy_outputs as flce_reference
from ligerprof.kernels.options import RETURNS, LossOptions, LossOutputs
from tests.kernels.oracle import LOSS_ROUNDINGS, assert_matches_fp64, in_fp64, leaves, relative_error
from tests.sampling import sampled

VOCAB, HIDDEN, SHAPE = 203, 24, (3, 7)
SMALL_BUDGET = 16 * 208 * 4
FP32 = LOSS_ROUNDINGS[torch.float32]
OPTIONS = {
    "mean": LossOptions(),
    "sum": LossOptions(reduction="sum"),
    "none": LossOptions(reduction="none", z_loss=1e-2),
    "temperature": LossOptions(reduction="none", logit_scale=1 / 0.7),
    "shift-2": LossOptions(shift=2, reduction="none"),
    "capped": LossOptions(softcap=3.0, logit_scale=1.5, z_loss=1e-2, label_smoothing=0.1),
    "token-scaling": LossOptions(token_scaling=True, z_loss=1e-2, shift=True),
    "token-scaling-none": LossOptions(token_scaling=True, reduction="none", label_smoothing=0.1),
}


def ce(*arguments: Any, **named: Any) -> LossOutputs:
    from ligerprof.kernels.cross_entropy.triton import cross_entropy_outputs

    return cross_entropy_outputs(*arguments, **named)


def flce(*arguments: Any, **named: Any) -> LossOutputs:
    from ligerprof.kernels.linear_cross_entropy.triton import fused_linear_cross_entropy_outputs

    return fused_linear_cross_entropy_outputs(*arguments, **named)


def problem(slot: str, device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Inputs that want a gradient, and labels, of which some are ignored and some are the most likely words."""
    states = torch.randn(*SHAPE, HIDDEN, device=device).to(dtype)
    weight = (2 * HIDDEN**-0.5 * torch.randn(VOCAB, HIDDEN, device=device)).to(dtype)
    bias = torch.randn(VOCAB, device=device).to(dtype)
    labels = torch.randint(0, VOCAB, SHAPE, device=device)
    likely = (states @ weight.t() + bias).argmax(-1)
    labels.view(-1)[::3] = likely.view(-1)[::3]
    labels.view(-1)[1:-1:4] = -100
    inputs = [states @ weight.t() + bias] if slot == "ce" else [states, weight, bias]
    return [*leaves(*inputs), labels]


def calls(slot: str, **named: Any) -> tuple[Callable[..., LossOutputs], Callable[..., LossOutputs]]:
    """The kernel and the reference as functions of `problem`'s inputs."""
    options = named.pop("options")
    if slot == "ce":
        in_place = LossOptions(**{name: getattr(options, name) for name in LossOptions.__slots__} | {"in_place": True})
        return (
            lambda x, y: ce(x, y, in_place, returns=RETURNS, **named),
            lambda x, y: ce_reference(x, y, options, **named),
        )
    return (
        lambda x, w, b, y: flce(x, w, y, options, b, returns=RETURNS, **named),
        lambda x, w, b, y: flce_reference(x, w, y, options, b, **named),
    )


def with_gradient(outputs: LossOutputs) -> tuple[Tensor, ...]:
    assert outputs.lse is not None
    assert outputs.entropy is not None
    return outputs.loss, outputs.lse, outputs.entropy


def gradients_of(options: LossOptions, device: torch.device) -> list[Tensor]:
    loss = torch.rand(SHAPE if options.reduction == "none" else (), device=device)
    return [loss, *torch.randn(2, *SHAPE, device=device)]


@sampled("name", OPTIONS, every=2)
@pytest.mark.parametrize("slot", ["ce", "flce"])
def test_every_output_and_its_gradient_match_fp64(slot: str, name: str, device: torch.device) -> None:
    options, inputs = OPTIONS[name], problem(slot, device)
    kernel, reference = calls(slot, options=options)
    if slot == "ce":
        inputs = [inputs[0].detach().clone().requires_grad_(), inputs[1]]
    expected = reference(*in_fp64(inputs))
    found = kernel(*(value.detach().clone() for value in inputs))
    for result in ("z_loss", "token_accuracy"):
        assert relative_error(getattr(found, result), getattr(expected, result)) < FP32
    assert found.predicted_tokens is not None
    assert torch.equal(found.predicted_tokens.cpu(), expected.predicted_tokens)
    grads = gradients_of(options, device)

    def of_copies(*given: Tensor) -> tuple[Tensor, ...]:
        # not leaves, which the loss may overwrite
        return with_gradient(kernel(*(value.clone() for value in given)))

    assert_matches_fp64(of_copies, lambda *g: with_gradient(reference(*g)), inputs, 2 * FP32, grads)


@pytest.mark.parametrize("wanted", ["loss", "lse", "entropy"])
@pytest.mark.parametrize("slot", ["ce", "flce"])
def test_the_gradient_of_one_output_alone(slot: str, wanted: str, device: torch.device) -> None:
    kernel, reference = calls(slot, options=LossOptions(z_loss=1e-2))
    assert_matches_fp64(
        lambda *g: getattr(kernel(*(value.clone() for value in g)), wanted),
        lambda *g: getattr(reference(*g), wanted),
        problem(slot, device),
        2 * FP32,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("slot", ["ce", "flce"])
def test_outputs_of_16_bit_logits(slot: str, dtype: torch.dtype, device: torch.device) -> None:
    options = LossOptions(budget=SMALL_BUDGET)
    kernel, reference = calls(slot, options=options)
    assert_matches_fp64(
        lambda *g: with_gradient(kernel(*(value.clone() for value in g))),
        lambda *g: with_gradient(reference(*g)),
        problem(slot, device, dtype),
        LOSS_ROUNDINGS[dtype],
        gradients_of(options, device),
    )


def test_entropies_of_tokens_in_the_heads_gradient(device: torch.device) -> None:
    """Their statistics come block by block, and the gradient of the entropy from those."""
    tokens, hidden = 44, 32
    options = LossOptions(budget=16 * 208 * 4, reduction="none", token_scaling=True)
    plan = plan_chunks(
        tokens=tokens,
        hidden=hidden,
        vocab=VOCAB,
        element_bytes=4,
        budget=options.budget,
        gradient_bytes=4,
        entropy=True,
    )
    assert 0 < plan.scratch_tokens < tokens
    assert len(plan.blocks) > 1
    labels = torch.randint(0, VOCAB, (tokens,), device=device)
    inputs = leaves(torch.randn(tokens, hidden, device=device), torch.randn(VOCAB, hidden, device=device))
    grads = list(torch.randn(3, tokens, device=device))
    assert_matches_fp64(
        lambda x, w: with_gradient(flce(x, w, labels, options, returns=RETURNS)),
        lambda x, w: with_gradient(flce_reference(x, w, labels.cpu(), options)),
        inputs,
        2 * FP32,
        grads,
    )


@pytest.mark.parametrize("slot", ["ce", "flce"])
def test_logits_of_minus_infinity_add_nothing_to_the_entropy(slot: str, device: torch.device) -> None:
    inputs = problem(slot, device)
    place = 0 if slot == "ce" else 2
    masked = inputs[place].detach().clone()
    masked[..., 60:] = float("-inf")
    inputs[place] = masked.requires_grad_()
    inputs[-1] = inputs[-1].clamp(max=59)
    kernel, reference = calls(slot, options=LossOptions(reduction="none"))
    assert_matches_fp64(
        lambda *g: with_gradient(kernel(*(value.clone() for value in g))),
        lambda *g: with_gradient(reference(*g)),
        inputs,
        2 * FP32,
        gradients_of(LossOptions(reduction="none"), device),
    )


@pytest.mark.parametrize("slot", ["ce", "flce"])
def test_results_without_a_gradient_leave_the_loss_as_it_is(slot: str, device: torch.device) -> None:
    inputs, options = problem(slot, device), LossOptions(z_loss=1e-2)
    call = {"ce": lambda x, y, n: ce(x, y, options, returns=n)}.get(
        slot, lambda x, w, b, y, n: flce(x, w, y, options, b, returns=n)
    )
    plain, more = (call(*inputs, names) for names in ((), ("predicted_tokens", "z_loss", "token_accuracy")))
    assert plain[1:] == (None,) * 5
    assert more.lse is None
    for one, other in zip(*(torch.autograd.grad(out.loss, inputs[:-1]) for out in (plain, more)), strict=True):
        assert torch.equal(one, other)


def test_a_result_that_does_not_exist(device: torch.device) -> None:
    with pytest.raises(KernelInputError, match=r"no result 'logits'. Known: lse, entropy"):
        ce(*problem("ce", device), returns=("lse", "logits"))


@pytest.mark.parametrize("slot", ["ce", "flce"])
def test_labels_outside_the_vocabulary_are_errors_where_they_are_checked(slot: str, device: torch.device) -> None:
    kernel, _ = calls(slot, options=LossOptions(check_labels=True))
    for label in (VOCAB, -1):
        *inputs, labels = problem(slot, device)
        labels[0, 0] = label
        for kind in (LabelError, KernelInputError, IndexError, AssertionError):
            with pytest.raises(kind, match=f"label {label} is out of bounds for a vocabulary of {VOCAB}"):
                kernel(*inputs, labels)


@sampled("dynamic", [None, True], every=2)
@sampled("slot", ["ce", "flce"], every=2)
def test_compiled_in_one_graph(slot: str, dynamic: bool | None, device: torch.device) -> None:
    torch.compiler.reset()
    options = LossOptions(z_loss=1e-2, softcap=4.0, budget=SMALL_BUDGET, ignore_index=-100)
    kernel, reference = calls(slot, options=options)

    def doubled(*given: Tensor) -> LossOutputs:
        return kernel(*(torch.tanh(value) if value.is_floating_point() else value for value in given))

    compiled = torch.compile(doubled, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    inputs = problem(slot, device)
    expected = reference(*(torch.tanh(value) if value.is_floating_point() else value for value in in_fp64(inputs)))
    found = compiled(*inputs)
    for result in RETURNS:
        assert relative_error(getattr(found, result), getattr(expected, result)) < 2 * FP32
    assert_matches_fp64(
        lambda *g: with_gradient(compiled(*g)),
        lambda *g: with_gradient(
            reference(*(torch.tanh(value) if value.is_floating_point() else value for value in g))
        ),
        inputs,
        2 * FP32,
        gradients_of(options, device),
    )
