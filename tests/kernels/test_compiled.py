"""Both losses inside torch.compile: one graph, the same values and gradients as without."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from ligerprof.kernels import apply
from ligerprof.kernels.options import LossOptions, pack_options, unpack_options
from tests.kernels.conftest import INTERPRETED
from tests.kernels.models import batch, tiny_model, train_once
from tests.kernels.oracle import relative_error, run
from tests.sampling import sampled

VOCAB, HIDDEN = 509, 40
# few tokens, because the interpreter is slow, but more than the smallest chunk
SHAPE = (2, 9)
SMALL_BUDGET = 16 * 512 * 4
OPTIONS = {
    "mean": LossOptions(shift=True, budget=SMALL_BUDGET),
    "none": LossOptions(reduction="none", budget="lean"),
    "rest": LossOptions(label_smoothing=0.1, z_loss=1e-3, softcap=5.0, ignore_index=3, in_place=True),
}


def inputs(device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    states = torch.randn(*SHAPE, HIDDEN, device=device, dtype=dtype, requires_grad=True)
    weight = (0.3 * torch.randn(VOCAB, HIDDEN, device=device)).to(dtype).requires_grad_()
    return [states, weight, torch.randint(VOCAB, SHAPE, device=device)]


def fused(options: LossOptions, **more: Any) -> Callable[..., Tensor]:
    from ligerprof.kernels.linear_cross_entropy.triton import fused_linear_cross_entropy

    # operations before and after the loss, so that autograd goes through it
    return lambda x, w, y: 2 * fused_linear_cross_entropy(torch.tanh(x), w, y, options, **more)


def given_logits(options: LossOptions, **more: Any) -> Callable[..., Tensor]:
    from ligerprof.kernels.cross_entropy.triton import cross_entropy

    return lambda x, w, y: 2 * cross_entropy(torch.tanh(x) @ w.t(), y, options, **more)


def assert_compiles(function: Callable[..., Tensor], given: list[Tensor], backend: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    expected, got = run(function, given), run(compiled, given)
    assert max(relative_error(one, other) for one, other in zip(got, expected, strict=True)) < 1e-6


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("make", [fused, given_logits])
def test_one_graph_with_the_same_gradients(make: Any, name: str, backend: str, device: torch.device) -> None:
    if backend == "inductor" and device.type == "cpu":
        pytest.skip("inductor cannot compile for the interpreter")
    assert_compiles(make(OPTIONS[name]), inputs(device), backend)


@pytest.mark.parametrize("make", [fused, given_logits])
def test_divisors_and_class_weights_on_the_device(make: Any, device: torch.device) -> None:
    class_weight = torch.rand(VOCAB, device=device)
    for items in (torch.tensor(17.0, device=device), 20):
        assert_compiles(make(LossOptions(), num_items=items, class_weight=class_weight), inputs(device), "aot_eager")


def test_bias_predictions_and_frozen_hidden_states(device: torch.device) -> None:
    states, weight, labels = inputs(device)
    states.requires_grad_(False)  # noqa: FBT003
    bias = torch.randn(VOCAB, device=device, requires_grad=True)
    seen = []
    for compile_it in (False, True):
        torch.compiler.reset()
        predictions = torch.empty_like(labels)
        function = fused(LossOptions(), bias=bias, predictions=predictions)
        loss = torch.compile(function, backend="aot_eager", fullgraph=True) if compile_it else function
        seen.append([*run(loss, [states, weight, labels]), *torch.autograd.grad(loss(states, weight, labels), bias)])
        seen[-1].append(predictions)
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


def test_under_autocast(device: torch.device) -> None:
    def half(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return fused(LossOptions(budget=SMALL_BUDGET))(x, w, y)

    assert_compiles(half, inputs(device), "aot_eager")


def test_fp16_gradients_wait_for_the_loss_scale(device: torch.device) -> None:
    for make in (fused, given_logits):
        assert_compiles(make(LossOptions()), inputs(device, torch.float16), "aot_eager")


@pytest.mark.parametrize("make", [fused, given_logits])
def test_a_second_graph_serves_every_other_number_of_tokens(make: Any, device: torch.device) -> None:
    torch.compiler.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    function = make(OPTIONS["mean"])
    compiled = torch.compile(function, backend=graphs, fullgraph=True)
    states, weight, labels = inputs(device)
    for sequences, tokens in ((2, 5), (2, 7), (2, 9)):
        given = [states.detach()[:1, :1].repeat(sequences, tokens, 1).requires_grad_(), weight]
        given.append(labels[:1, :1].repeat(sequences, tokens))
        expected, got = run(function, given), run(compiled, given)
        assert max(relative_error(one, other) for one, other in zip(got, expected, strict=True)) < 1e-6
    assert graphs.frame_count == 2


@sampled("kernel", ["flce", "ce"], every=2)
def test_a_patched_model_is_one_graph(kernel: str) -> None:
    """Its loss and gradients, with our Triton kernel inside."""
    if not INTERPRETED:
        pytest.skip("kernels are compiled in this process; the interpreter needs TRITON_INTERPRET=1")
    torch.compiler.reset()
    model = tiny_model("llama", num_hidden_layers=1)
    loss, gradients = train_once(model)
    model.zero_grad()
    with apply(model, kernel):
        compiled_loss = torch.compile(model, backend="aot_eager", fullgraph=True)(**batch(model)).loss
    compiled_loss.backward()
    assert compiled_loss.item() == pytest.approx(loss, rel=1e-6)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert relative_error(parameter.grad, gradients[name]) < 1e-5


def test_a_compiled_graph_carries_every_option() -> None:
    each = LossOptions(token_scaling=True, accumulate_fp32=True, fp32_logits=True, check_labels=True, budget=7)
    for options in (*OPTIONS.values(), each):
        assert unpack_options(pack_options(options)) == options
