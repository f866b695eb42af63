"""SwiGLU and GeGLU against their references in fp64."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ligerprof.errors import KernelInputError
from ligerprof.kernels import find_kernel
from ligerprof.kernels.gated import reference
from ligerprof.kernels.spec import load_entry
from tests.kernels.oracle import DTYPES, ROUNDING, assert_matches_fp64, leaves, relative_error, run
from tests.sampling import sampled

Gated = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(params=["swiglu", "geglu", "exact-geglu"])
def pair(request: pytest.FixtureRequest) -> tuple[Gated, Gated]:
    from ligerprof.kernels.gated.triton import geglu, swiglu

    both: dict[str, Any] = {
        "swiglu": (swiglu, reference.swiglu),
        "geglu": (geglu, reference.geglu),
        "exact-geglu": tuple(partial(function, approximate="none") for function in (geglu, reference.geglu)),
    }
    return both[request.param]  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@sampled("shape", [(2, 9, 131), (1, 272), (3, 2500)], ids=str, every=3)
def test_matches_fp64(
    pair: tuple[Gated, Gated], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    gate, up, grad = (2 * torch.randn(shape, dtype=dtype, device=device) for _ in range(3))
    assert_matches_fp64(*pair, leaves(gate, up), ROUNDING[dtype], [grad])


def test_large_gates_neither_overflow_nor_lose_their_gradient(pair: tuple[Gated, Gated], device: torch.device) -> None:
    gate = torch.tensor([[-1e15, -300.0, -30.0, -1.0, 0.0, 1.0, 30.0, 300.0]], device=device)
    assert_matches_fp64(*pair, leaves(gate, torch.ones_like(gate)), ROUNDING[torch.float32])


def test_reads_the_halves_of_one_projection_where_they_lie(pair: tuple[Gated, Gated], device: torch.device) -> None:
    both = torch.randn(5, 2 * 90, device=device)
    gate, up = leaves(*both.chunk(2, dim=-1))
    grad = torch.randn(90, 5, device=device).t()
    assert_matches_fp64(*pair, [gate, up], ROUNDING[torch.float32], [grad])


def test_one_frozen_input(pair: tuple[Gated, Gated], device: torch.device) -> None:
    gate, up = leaves(torch.randn(4, 70, device=device), torch.randn(4, 70, device=device))
    assert_matches_fp64(*pair, [gate.detach(), up], ROUNDING[torch.float32])
    assert_matches_fp64(*pair, [gate, up.detach()], ROUNDING[torch.float32])


def test_inputs_that_differ_are_refused(pair: tuple[Gated, Gated], device: torch.device) -> None:
    with pytest.raises(KernelInputError, match="differ"):
        pair[0](torch.zeros(2, 8, device=device), torch.zeros(2, 9, device=device))
    with pytest.raises(KernelInputError, match="differ"):
        pair[0](torch.zeros(2, 8, device=device), torch.zeros(2, 8, device=device, dtype=torch.bfloat16))


Linear = Callable[..., Tensor]


@pytest.fixture(params=["swiglu", "geglu", "exact-geglu"])
def linear_pair(request: pytest.FixtureRequest) -> tuple[Linear, Linear]:
    """The kernel with the linear layer behind it, and its reference."""
    exact, _, name = request.param.rpartition("-")
    spec, named = find_kernel(f"{name}_linear"), {"approximate": "none"} if exact else {}
    return partial(load_entry(spec.entry), **named), partial(load_entry(spec.reference), **named)


def gates_and_layer(dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    return leaves(
        torch.randn(2, 5, 136, dtype=dtype, device=device),
        torch.randn(2, 5, 136, dtype=dtype, device=device),
        torch.randn(24, 136, dtype=dtype, device=device) / 12,
        torch.randn(24, dtype=dtype, device=device),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_with_the_linear_layer_matches_fp64(
    linear_pair: tuple[Linear, Linear], dtype: torch.dtype, device: torch.device
) -> None:
    # product, output and each gradient are rounded
    grad = torch.randn(2, 5, 24, dtype=dtype, device=device)
    assert_matches_fp64(*linear_pair, gates_and_layer(dtype, device), 2 * ROUNDING[dtype], [grad])


@pytest.mark.parametrize("frozen", [(2,), (3,), (2, 3)], ids=str)
def test_with_a_frozen_linear_layer(
    frozen: tuple[int, ...], linear_pair: tuple[Linear, Linear], device: torch.device
) -> None:
    inputs = gates_and_layer(torch.float32, device)
    for index in frozen:
        inputs[index].requires_grad_(False)  # noqa: FBT003
    assert_matches_fp64(*linear_pair, inputs, 2 * ROUNDING[torch.float32])


def test_gates_are_overwritten_by_their_gradients_where_the_caller_allows_it(
    linear_pair: tuple[Linear, Linear], device: torch.device
) -> None:
    gate, up, weight, bias = gates_and_layer(torch.float32, device)
    expected = run(linear_pair[1], [gate, up, weight, bias])[1:]
    made = [gate.clone(), up.clone()]
    output = linear_pair[0](*made, weight, bias, overwrite=True)
    got = torch.autograd.grad(output, [gate, up, weight, bias], torch.ones_like(output))
    assert max(relative_error(value, right) for value, right in zip(got, expected, strict=True)) < 1e-5
    for value, gradient in zip(made, got[:2], strict=True):
        assert value.data_ptr() == gradient.data_ptr()


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[:1]], ids=["leaf", "view"])
def test_gates_that_are_leaves_are_never_overwritten(
    view: Callable[[Tensor], Tensor], linear_pair: tuple[Linear, Linear], device: torch.device
) -> None:
    """Or a parameter and its gradient would be one memory."""
    gate, up, weight, bias = gates_and_layer(torch.float32, device)
    kept = gate.detach().clone()
    linear_pair[0](view(gate), view(up), weight, bias, overwrite=True).sum().backward()
    assert torch.equal(gate.detach(), kept)
    assert gate.grad is not None
    assert gate.grad.data_ptr() != gate.data_ptr()


def test_a_retained_graph_gives_the_same_gradients_again(
    linear_pair: tuple[Linear, Linear], device: torch.device
) -> None:
    gate, up, weight, bias = gates_and_layer(torch.float32, device)
    output = linear_pair[0](gate.clone(), up.clone(), weight, bias, overwrite=True).square().sum()
    first = torch.autograd.grad(output, [gate, up, weight], retain_graph=True)
    second = torch.autograd.grad(output, [gate, up, weight])
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_overwritten_gates_still_needed_raise(linear_pair: tuple[Linear, Linear], device: torch.device) -> None:
    gate, up, weight, bias = gates_and_layer(torch.float32, device)
    made = gate.clone()
    total = made.square().sum() + linear_pair[0](made, up.clone(), weight, bias, overwrite=True).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_recomputation_runs_neither_product_nor_linear_layer(
    linear_pair: tuple[Linear, Linear], device: torch.device
) -> None:
    """torch.utils.checkpoint stops at the last tensor that is kept."""
    gate, up, weight, bias = gates_and_layer(torch.float32, device)
    counter = FlopCounterMode(display=False)

    def layer(one: Tensor, other: Tensor) -> Tensor:
        return linear_pair[0](one.clone(), other.clone(), weight, bias, overwrite=True)

    output = checkpoint(layer, gate, up, use_reentrant=False)
    with counter:
        output.sum().backward()
    # the gradients of product and weight
    assert counter.get_total_flops() == 2 * (2 * 10 * 24 * 136)


@pytest.mark.gpu
@pytest.mark.parametrize("strided", [False, True])
def test_compiled_with_the_linear_layer(
    linear_pair: tuple[Linear, Linear], strided: bool, device: torch.device
) -> None:
    """Sequences and outputs of other lengths make Dynamo trace symbols."""
    compiled = torch.compile(linear_pair[0], fullgraph=True)
    for tokens, outputs in ((512, 256), (500, 64), (512, 256)):
        shape = (2, tokens, 2 * 128)
        gates = (
            torch.randn(shape, device=device).chunk(2, -1) if strided else torch.randn(2, 2, tokens, 128, device=device)
        )
        layer = torch.randn(outputs, 128, device=device) / 12, torch.randn(outputs, device=device)
        assert_matches_fp64(compiled, linear_pair[1], leaves(*gates, *layer), 2 * ROUNDING[torch.float32])


def test_a_linear_layer_that_does_not_go_with_the_gates_is_refused(
    linear_pair: tuple[Linear, Linear], device: torch.device
) -> None:
    gate = torch.zeros(2, 8, device=device)
    with pytest.raises(KernelInputError, match="does not match"):
        linear_pair[0](gate, gate, torch.zeros(4, 9, device=device))


@pytest.mark.parametrize("name", ["swiglu", "geglu"])
def test_multipliers_of_gate_and_product(name: str, device: torch.device) -> None:
    from ligerprof.kernels.gated import triton

    for named in ({"gate_multiplier": 0.6}, {"multiplier": 1.7}, {"gate_multiplier": -1.4, "multiplier": 0.5}):
        inputs = leaves(*torch.randn(2, 3, 5, 40, device=device))
        grad = torch.randn(3, 5, 40, device=device)
        assert_matches_fp64(
            lambda *g: getattr(triton, name)(*g, **named),  # noqa: B023
            lambda *g: getattr(reference, name)(*g, **named),  # noqa: B023
            inputs,
            ROUNDING[torch.float32],
            [grad],
        )
