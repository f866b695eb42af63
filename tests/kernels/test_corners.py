"""Unusual inputs of every kernel: strides, overlapping memory, no tokens, huge values, gradients of gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ligerprof.errors import KernelInputError
from ligerprof.kernels.cross_entropy.reference import cross_entropy as ce_reference
from ligerprof.kernels.linear_cross_entropy.reference import fused_linear_cross_entropy as flce_reference
from ligerprof.kernels.norm import reference as norms
from ligerprof.kernels.options import LossOptions
from tests.kernels.oracle import LOSS_ROUNDINGS, ROUNDING, assert_matches_fp64, relative_error

VOCAB = 203
FP32 = ROUNDING[torch.float32]


def ce(*arguments: Any, **named: Any) -> Tensor:
    from ligerprof.kernels.cross_entropy.triton import cross_entropy

    return cross_entropy(*arguments, **named)


def flce(*arguments: Any, **named: Any) -> Tensor:
    from ligerprof.kernels.linear_cross_entropy.triton import fused_linear_cross_entropy

    return fused_linear_cross_entropy(*arguments, **named)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    from ligerprof.kernels.norm.triton import rms_norm

    return rms_norm(x, weight, 1e-5)


def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    from ligerprof.kernels.norm.triton import layer_norm

    return layer_norm(x, weight, bias, 1e-5)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    from ligerprof.kernels.gated.triton import swiglu

    return swiglu(gate, up)


def swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor, **named: Any) -> Tensor:
    from ligerprof.kernels.gated.triton import swiglu_linear

    return swiglu_linear(gate, up, weight, **named)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    from ligerprof.kernels.rope.triton import apply_rope

    return apply_rope(q, k, cos, sin)


def head_and_labels(device: torch.device, tokens: int = 9, hidden: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(tokens, hidden, device=device, requires_grad=True)
    weight = torch.randn(VOCAB, hidden, device=device, requires_grad=True)
    return x, weight, torch.randint(0, VOCAB, (tokens,), device=device)


def every_other(size: int, device: torch.device) -> Tensor:
    return torch.randn(2 * size, device=device)[::2].requires_grad_()


def test_parameters_with_gaps_between_their_elements(device: torch.device) -> None:
    x = torch.randn(5, 24, device=device, requires_grad=True)
    weight, bias = every_other(24, device), every_other(24, device)
    assert_matches_fp64(rms, lambda *g: norms.rms_norm(*g, 1e-5), [x, weight], FP32)
    assert_matches_fp64(layer, lambda *g: norms.layer_norm(*g, 1e-5), [x, weight, bias], FP32)
    hidden, head, labels = head_and_labels(device)
    assert_matches_fp64(
        lambda x, w, b: flce(x, w, labels, bias=b),
        lambda x, w, b: flce_reference(x, w, labels.cpu(), bias=b),
        [hidden, head, every_other(VOCAB, device)],
        LOSS_ROUNDINGS[torch.float32],
    )


def test_no_tokens_give_zero_gradients(device: torch.device) -> None:
    hidden, head, labels = head_and_labels(device, tokens=0)
    bias = torch.randn(VOCAB, device=device, requires_grad=True)
    # memory that a fresh buffer is likely to reuse
    del_me = torch.full_like(head, float("nan"))
    del del_me
    loss = flce(hidden, head, labels, bias=bias)
    assert loss.item() == 0.0
    grads = torch.autograd.grad(loss, [hidden, head, bias])
    assert [grad.shape for grad in grads] == [hidden.shape, head.shape, bias.shape]
    assert not any(grad.any() for grad in grads)
    logits = torch.empty(0, VOCAB, device=device, requires_grad=True)
    assert ce(logits, labels).item() == 0.0


@pytest.mark.parametrize("items", [0, 0.0, torch.tensor(0), torch.tensor([0.0])], ids=repr)
def test_no_items_give_a_loss_of_zero(items: Any, device: torch.device) -> None:
    hidden, head, labels = head_and_labels(device)
    items = items.to(device) if isinstance(items, Tensor) else items
    loss = flce(hidden, head, torch.full_like(labels, -100), num_items=items)
    assert loss.item() == 0.0
    assert not any(grad.any() for grad in torch.autograd.grad(loss, [hidden, head]))


def test_logits_overwritten_in_backward_cannot_be_used_again(device: torch.device) -> None:
    leaf = torch.randn(4, VOCAB, device=device, requires_grad=True)
    logits = leaf.clone()
    squares = logits * logits
    losses = ce(logits, torch.zeros(4, dtype=torch.int64, device=device), LossOptions(in_place=True, reduction="none"))
    torch.autograd.grad(losses.sum(), logits)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.sum().backward()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_expanded_logits_are_never_overwritten(reduction: str, device: torch.device) -> None:
    row = torch.randn(1, VOCAB, device=device, requires_grad=True)
    labels = torch.arange(5, device=device)
    options = LossOptions(in_place=True, reduction=reduction)
    assert_matches_fp64(
        lambda r: ce(r.expand(5, VOCAB), labels, options),
        lambda r: ce_reference(r.expand(5, VOCAB), labels.cpu(), options),
        [row],
        LOSS_ROUNDINGS[torch.float32],
    )


def test_gates_that_share_memory_are_never_overwritten(device: torch.device) -> None:
    weight = torch.randn(6, 8, device=device)
    z = torch.randn(3, 8, device=device, requires_grad=True)

    def expected(z: Tensor) -> Tensor:
        return functional.linear(functional.silu(z) * z, weight.to(z))

    def from_clone(z: Tensor) -> Tensor:
        gate = z.clone()
        return swiglu_linear(gate, gate, weight, overwrite=True)

    def shifted(z: Tensor) -> Tensor:
        wide = z.clone()
        return swiglu_linear(wide[:, :6], wide[:, 2:], weight[:, :6], overwrite=True)

    def expected_of_shifted(z: Tensor) -> Tensor:
        return functional.linear(functional.silu(z[:, :6]) * z[:, 2:], weight[:, :6].to(z))

    def expanded(z: Tensor) -> Tensor:
        return swiglu_linear(z[:1].clone().expand(3, 8), z.clone(), weight, overwrite=True)

    def expected_of_expanded(z: Tensor) -> Tensor:
        return functional.linear(functional.silu(z[:1]) * z, weight.to(z))

    assert_matches_fp64(from_clone, expected, [z], 2 * FP32)
    assert_matches_fp64(shifted, expected_of_shifted, [z], 2 * FP32)
    assert_matches_fp64(expanded, expected_of_expanded, [z], 2 * FP32)


@pytest.mark.parametrize("offset", [1e4, -3e5])
def test_a_large_offset_of_all_logits_costs_no_accuracy(offset: float, device: torch.device) -> None:
    """The offset rounds the logits; of the rounded ones, loss and gradient are as exact as without it."""
    logits = (torch.randn(3, VOCAB, device=device) + offset).requires_grad_()
    labels = torch.tensor([0, 1, VOCAB - 1], device=device)
    assert_matches_fp64(ce, ce_reference, [logits, labels], LOSS_ROUNDINGS[torch.float32])


def test_predictions_of_rows_without_a_number(device: torch.device) -> None:
    hidden, head, labels = head_and_labels(device, tokens=6)
    bias = torch.full((VOCAB,), float("-inf"), device=device)
    for logits_bias in (bias, torch.full_like(bias, float("nan"))):
        for budget in ("balanced", 16 * VOCAB * 4 + 6 * 16):
            predictions = torch.full((6,), -7, device=device)
            flce(hidden, head, labels, LossOptions(budget=budget), bias=logits_bias, predictions=predictions)
            assert ((predictions >= 0) & (predictions < VOCAB)).all()


@pytest.mark.slow
def test_fp16_sums_over_many_tokens_stay_finite(device: torch.device) -> None:
    """The tokens' gradients add up before the factor of the mean and the loss scale are known."""
    tokens = 4096
    hidden = torch.full((tokens, 8), 30.0, dtype=torch.float16, device=device).requires_grad_()
    weight = torch.zeros(20, 8, dtype=torch.float16, device=device).requires_grad_()
    labels = torch.zeros(tokens, dtype=torch.int64, device=device)
    assert_matches_fp64(
        lambda *g: flce(*g, labels),
        lambda *g: flce_reference(*g, labels.cpu()),
        [hidden, weight],
        LOSS_ROUNDINGS[torch.float16],
        [torch.tensor(16.0, device=device)],
    )


def test_a_head_in_another_dtype_is_cast_to_the_hidden_states(device: torch.device) -> None:
    hidden, head, labels = head_and_labels(device)
    narrow = head.detach().bfloat16().requires_grad_()
    grads = torch.autograd.grad(flce(hidden, narrow, labels), [hidden, narrow])
    assert [grad.dtype for grad in grads] == [torch.float32, torch.bfloat16]
    expected = torch.autograd.grad(flce_reference(hidden, narrow.float(), labels), [hidden, narrow])
    assert relative_error(grads[0], expected[0]) < LOSS_ROUNDINGS[torch.float32]
    assert relative_error(grads[1], expected[1]) < LOSS_ROUNDINGS[torch.bfloat16]


def test_bf16_class_weights_are_summed_in_fp32(device: torch.device) -> None:
    logits = torch.randn(3, 3000, device=device, requires_grad=True)
    labels = torch.tensor([0, 1, 2], device=device)
    weights = torch.rand(3000, device=device).bfloat16()
    options = LossOptions(label_smoothing=0.3)
    assert_matches_fp64(
        lambda x: ce(x, labels, options, class_weight=weights),
        lambda x: ce_reference(x, labels.cpu(), options, class_weight=weights.cpu().to(x)),
        [logits],
        2 * LOSS_ROUNDINGS[torch.float32],
    )


def test_angles_that_want_a_gradient_are_refused(device: torch.device) -> None:
    q, k = (torch.randn(1, 2, 3, 8, device=device) for _ in range(2))
    cos, sin = torch.rand(1, 3, 8, device=device, requires_grad=True), torch.rand(1, 3, 8, device=device)
    with pytest.raises(KernelInputError, match="angles require a gradient"):
        rope(q, k, cos, sin)
    with torch.no_grad():
        rope(q, k, cos, sin)


def every_kernel(device: torch.device) -> list[tuple[Callable[..., Any], list[Tensor]]]:
    hidden, head, labels = head_and_labels(device)
    x = torch.randn(3, 8, device=device, requires_grad=True)
    weight = torch.ones(8, device=device)
    q = torch.randn(1, 2, 3, 8, device=device, requires_grad=True)
    angle = torch.rand(1, 3, 8, device=device)
    return [
        (lambda h, w: flce(h, w, labels), [hidden, head]),
        (lambda h, w: ce(h @ w.t(), labels), [hidden, head]),
        (lambda x: rms(x, weight), [x]),
        (lambda x: layer(x, weight, weight), [x]),
        (lambda x: swiglu(x, x), [x]),
        (lambda x: swiglu_linear(x, x, torch.ones(4, 8, device=device)), [x]),
        (lambda q: rope(q, q, angle, angle)[0], [q]),
    ]


@pytest.mark.parametrize("number", range(7))
def test_a_gradient_penalty_raises_an_error(number: int, device: torch.device) -> None:
    """Its incoming gradient is a constant: a second derivative of zero would pass unnoticed."""
    function, inputs = every_kernel(device)[number]
    grads = torch.autograd.grad(function(*inputs).sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        sum(grad.square().sum() for grad in grads).backward()


def test_distributed_tensors_are_refused(device: torch.device) -> None:
    class Distributed(torch.Tensor):
        def to_local(self) -> None: ...

    x, other = torch.randn(3, 8, device=device), torch.ones(8, device=device)
    parameter = other.as_subclass(Distributed)
    for call in (
        lambda: rms(x, parameter),
        lambda: layer(x, other, parameter),
        lambda: swiglu(x, x.as_subclass(Distributed)),
        lambda: swiglu_linear(x, x, torch.ones(4, 8, device=device).as_subclass(Distributed)),
        lambda: flce(x, torch.ones(20, 8, device=device).as_subclass(Distributed), torch.zeros(3, dtype=torch.int64)),
    ):
        with pytest.raises(KernelInputError, match="a DTensor was given"):
            call()


def wrong_calls() -> dict[str, tuple[Callable[[], Any], str]]:
    x, head, labels = torch.randn(3, 8), torch.randn(20, 8), torch.tensor([0, 1, 2])
    meta, angle = x.to("meta"), torch.rand(1, 3, 7)
    q = torch.randn(1, 2, 3, 7)

    def label_logits(*arguments: Any) -> Tensor:
        from ligerprof.kernels.linear_cross_entropy.scores import linear_label_logits

        return linear_label_logits(*arguments)

    def geglu(*arguments: Any, **named: Any) -> Tensor:
        from ligerprof.kernels.gated.triton import geglu

        return geglu(*arguments, **named)

    return {
        "bias too long": (lambda: flce(x, head, labels, bias=torch.ones(21)), r"bias of shape \(21,\)"),
        "bias too short": (lambda: flce(x, head, labels, bias=torch.ones(19)), r"bias of shape \(19,\)"),
        "head without words": (lambda: flce(x, head[0], labels), "do not match"),
        "stacked heads": (lambda: flce(x, head[None], labels), r"Give a head \[V, D\]"),
        "probabilities": (lambda: ce(x, x.softmax(-1)), "probabilities as targets"),
        "labels with fractions": (lambda: flce(x, head, labels.float()), "probabilities as targets"),
        "masks as labels": (lambda: flce(x, head, labels > 0), "probabilities as targets"),
        "several counts": (lambda: flce(x, head, labels, num_items=torch.ones(2)), "Give one number"),
        "integers": (lambda: rms(labels[None], torch.ones(3)), "floating-point numbers"),
        "integer gates": (lambda: swiglu(labels, labels), "floating-point numbers"),
        "integer logits": (lambda: ce(torch.ones(3, 4, dtype=torch.int64), labels), "floating-point numbers"),
        "complex rows": (lambda: rms(x.to(torch.complex64), head[0]), "floating-point numbers"),
        "one number": (lambda: rms(torch.tensor(1.0), torch.tensor(1.0)), "rows of at least one"),
        "empty rows": (lambda: rms(x[:, :0], head[0, :0]), "rows of at least one"),
        "empty hidden states": (lambda: flce(x[:, :0], head[:, :0], labels), "rows of at least one"),
        "meta rows": (lambda: rms(meta, meta[0]), "device meta"),
        "meta head": (lambda: flce(meta, head.to("meta"), labels), "device meta"),
        "two devices": (lambda: layer(x, head[0].to("meta"), head[0]), "on cpu and on meta"),
        "bias of the next layer": (lambda: swiglu_linear(x, x, head, bias=torch.ones(8)), "does not match a weight"),
        "another GELU": (lambda: geglu(x, x, approximate="erf"), "Known: tanh, none"),
        "heads of an odd size": (lambda: rope(q, q, angle, angle), "an even size"),
        "label of no word": (lambda: label_logits(x, head, labels + 18), "label 20 is out of bounds"),
    }


@pytest.mark.parametrize("name", wrong_calls())
def test_a_wrong_call_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    call, problem = wrong_calls()[name]
    with pytest.raises(KernelInputError, match=problem) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_tensors_on_a_cpu_need_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(KernelInputError, match="set TRITON_INTERPRET=1"):
        swiglu(torch.ones(2, 4), torch.ones(2, 4))


def test_one_token_without_an_axis_of_tokens(device: torch.device) -> None:
    hidden, head, _ = head_and_labels(device)
    label = torch.tensor(3, device=device)
    for reduction in ("mean", "none"):
        options = LossOptions(reduction=reduction)
        assert_matches_fp64(
            lambda h, w, o=options: flce(h, w, label, o),
            lambda h, w, o=options: flce_reference(h, w, label.cpu(), o),
            [hidden[0].detach().requires_grad_(), head],
            LOSS_ROUNDINGS[torch.float32],
        )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_labels_of_narrow_integers(dtype: torch.dtype, device: torch.device) -> None:
    from ligerprof.kernels.linear_cross_entropy.scores import linear_label_logits

    hidden, head, labels = head_and_labels(device)
    assert torch.equal(flce(hidden, head, labels.to(dtype)), flce(hidden, head, labels))
    logits = [linear_label_logits(hidden, head, kind).sum() for kind in (labels, labels.to(dtype))]
    gradients = [torch.autograd.grad(value, head)[0] for value in logits]
    assert torch.equal(*gradients)


def test_labels_that_no_position_is_scored_against_are_not_checked(device: torch.device) -> None:
    hidden, head, labels = head_and_labels(device)
    labels[0] = VOCAB + 5
    options = LossOptions(shift=True, check_labels=True)
    assert flce(hidden, head, labels, options).isfinite()
    labels[1] = VOCAB
    with pytest.raises(KernelInputError, match=f"label {VOCAB} is out of bounds"):
        flce(hidden, head, labels, options)


@pytest.mark.gpu
def test_over_two_billion_elements() -> None:
    """Rows beyond the 2**31st element of the logits, and beyond that of the hidden states."""
    rows, vocab = 17_000, 131_072
    logits = torch.empty(rows, vocab, dtype=torch.bfloat16, device="cuda").normal_().requires_grad_()
    labels = torch.randint(0, vocab, (rows,), device="cuda")
    losses = ce(logits, labels, LossOptions(reduction="none"))
    (grad,) = torch.autograd.grad(losses.sum(), logits)
    tail = slice(rows - 64, rows)
    few = logits.detach()[tail].double().requires_grad_()
    expected = functional.cross_entropy(few, labels[tail], reduction="none")
    assert relative_error(losses[tail], expected) < LOSS_ROUNDINGS[torch.float32]
    (few_grad,) = torch.autograd.grad(expected.sum(), few)
    assert relative_error(grad[tail], few_grad) < LOSS_ROUNDINGS[torch.bfloat16]
    del logits, losses, grad
    x = torch.empty(2**19 + 64, 4096, dtype=torch.bfloat16, device="cuda").normal_()
    weight = torch.ones(4096, dtype=torch.bfloat16, device="cuda")
    tail = slice(2**19, None)
    assert relative_error(rms(x, weight)[tail], norms.rms_norm(x[tail].double(), weight.double(), 1e-5)) < 5e-3
    product = swiglu(x, x)
    few_x = x[tail].double()
    assert relative_error(product[tail], functional.silu(few_x) * few_x) < 5e-3


@pytest.mark.gpu
def test_every_kernel_in_a_cuda_graph() -> None:
    """Captured once and replayed with other inputs: the same results as without a graph."""
    device = torch.device("cuda")
    for function, inputs in every_kernel(device):

        def both_ways(function: Callable[..., Any] = function, inputs: list[Tensor] = inputs) -> list[Tensor]:
            result = function(*inputs)
            return [result.detach(), *torch.autograd.grad(result.sum(), inputs)]

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                both_ways()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = both_ways()
        with torch.no_grad():
            for value in inputs:
                value.copy_(torch.randn_like(value))
        graph.replay()
        expected = both_ways()
        assert all(torch.equal(got, right) for got, right in zip(captured, expected, strict=True))


@pytest.mark.gpu
def test_every_kernel_on_a_stream_of_its_own() -> None:
    device = torch.device("cuda")
    for function, inputs in every_kernel(device):
        expected = function(*inputs)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            result = function(*inputs)
            grads = torch.autograd.grad(result.sum(), inputs)
        stream.synchronize()
        assert torch.equal(result, expected)
        assert all(
            torch.equal(grad, right)
            for grad, right in zip(grads, torch.autograd.grad(expected.sum(), inputs), strict=True)
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compiled_norms_with_wider_weights(dtype: torch.dtype) -> None:
    x = torch.randn(16, 64, dtype=dtype, device="cuda", requires_grad=True)
    weight = torch.randn(64, device="cuda", requires_grad=True)
    compiled = torch.compile(rms, fullgraph=True)
    assert_matches_fp64(compiled, lambda *g: norms.rms_norm(*g, 1e-5), [x, weight], ROUNDING[torch.bfloat16])


@pytest.mark.gpu
def test_compiled_losses_with_options_made_inside_the_graph() -> None:
    def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
        return ce(logits, labels, LossOptions(label_smoothing=0.1))

    logits = torch.randn(8, VOCAB, device="cuda", requires_grad=True)
    labels = torch.randint(0, VOCAB, (8,), device="cuda")
    compiled = torch.compile(smoothed, fullgraph=True)
    assert relative_error(compiled(logits, labels), smoothed(logits, labels)) < LOSS_ROUNDINGS[torch.float32]
