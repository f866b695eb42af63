"""SwiGLU and GeGLU against their references in fp64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerprof.errors import KernelInputError
from ligerprof.kernels.geglu.reference import geglu as geglu_reference
from ligerprof.kernels.swiglu.reference import swiglu as swiglu_reference
from tests.kernels.oracle import DTYPES, ROUNDING, assert_matches_fp64, leaves

Gated = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(params=["swiglu", "geglu"])
def pair(request: pytest.FixtureRequest) -> tuple[Gated, Gated]:
    from ligerprof.kernels.geglu.triton import geglu
    from ligerprof.kernels.swiglu.triton import swiglu

    both: dict[str, Any] = {"swiglu": (swiglu, swiglu_reference), "geglu": (geglu, geglu_reference)}
    return both[request.param]  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 272), (2, 9, 131), (3, 2500)], ids=str)
def test_matches_fp64(
    pair: tuple[Gated, Gated], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    gate, up, grad = (2 * torch.randn(shape, dtype=dtype, device=device) for _ in range(3))
    assert_matches_fp64(*pair, leaves(gate, up), ROUNDING[dtype], [grad])


def test_large_gates_neither_overflow_nor_lose_their_gradient(pair: tuple[Gated, Gated], device: torch.device) -> None:
    gate = torch.tensor([[-300.0, -30.0, -1.0, 0.0, 1.0, 30.0, 300.0]], device=device)
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
    with pytest.raises(KernelInputError, match="must be alike"):
        pair[0](torch.zeros(2, 8, device=device), torch.zeros(2, 9, device=device))
    with pytest.raises(KernelInputError, match="must be alike"):
        pair[0](torch.zeros(2, 8, device=device), torch.zeros(2, 8, device=device, dtype=torch.bfloat16))
