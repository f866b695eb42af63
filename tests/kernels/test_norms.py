"""RMSNorm and LayerNorm against their references in fp64."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ligerprof.errors import KernelInputError
from ligerprof.kernels.norm import reference, triton
from ligerprof.kernels.norm.spec import (
    MAX_COLUMNS,
    backward_programs,
    is_long,
    plan_backward,
    plan_forward,
)
from tests.kernels.conftest import INTERPRETED
from tests.kernels.oracle import DTYPES, ROUNDING, assert_matches_fp64, leaves, run
from tests.sampling import sampled

EPS = 1e-5
# rows and columns that are not multiples of a block, a single row, rows narrow enough to share a program
SHAPES = [(1, 96), (37, 130), (70, 16), (5, 2304)]
# rows too wide for fp32 take the interpreter ten seconds each: every width and every dtype once, the others when slow
WIDE_SHAPES = {(3, 8200): torch.float16, (2, 12288): torch.float32, (2, 16384): torch.bfloat16}
CASES = [
    pytest.param(
        *shape,
        dtype,
        id=f"{shape[0]}x{shape[1]}-{dtype}",
        marks=[pytest.mark.slow] if WIDE_SHAPES.get(shape, dtype) is not dtype else [],
    )
    for shape in (*SHAPES, *WIDE_SHAPES)
    for dtype in DTYPES
]


@pytest.fixture(autouse=True)
def _wide_sums_in_few_programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes a hundredth of a second per program, and a wide norm's sums have thousands of them."""
    sizes = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if (sizes.get("rows"), sizes.get("columns")) in WIDE_SHAPES and sizes["device"] == "cpu":
        monkeypatch.setattr(triton, "_SUM_COLUMNS", 1024)


def rms(x: Tensor, weight: Tensor, offset: float = 0.0) -> Tensor:
    from ligerprof.kernels.norm.triton import rms_norm

    return rms_norm(x, weight, EPS, offset)


def add_rms(x: Tensor, residual: Tensor, weight: Tensor, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    from ligerprof.kernels.norm.triton import add_rms_norm

    return add_rms_norm(x, residual, weight, EPS, offset)


def layer(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    from ligerprof.kernels.norm.triton import layer_norm

    return layer_norm(x, weight, bias, EPS)


@sampled(("rows", "columns", "dtype"), CASES, every=4)
def test_rms_matches_fp64(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
    inputs = leaves(*(torch.randn(size, dtype=dtype, device=device) for size in ((rows, columns), (columns,))))
    grad = torch.randn(rows, columns, dtype=dtype, device=device)
    assert_matches_fp64(rms, lambda x, w: reference.rms_norm(x, w, EPS), inputs, ROUNDING[dtype], [grad])


def test_rms_with_gemmas_offset(device: torch.device) -> None:
    inputs = leaves(torch.randn(2, 7, 100, device=device), 0.1 * torch.randn(100, device=device))
    assert_matches_fp64(
        lambda x, w: rms(x, w, 1.0),
        lambda x, w: reference.rms_norm(x, w, EPS, 1.0),
        inputs,
        ROUNDING[torch.float32],
    )


def test_rms_of_16_bit_rows_with_an_fp32_weight_keeps_the_rows_dtype(device: torch.device) -> None:
    x, weight = leaves(torch.randn(9, 64, dtype=torch.bfloat16, device=device), torch.randn(64, device=device))
    y, x_grad, weight_grad = run(rms, [x, weight])
    assert (y.dtype, x_grad.dtype, weight_grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


def test_rms_reads_strided_rows_and_strided_gradients(device: torch.device) -> None:
    x = torch.randn(6, 3, 80, device=device)[:, :, :50].requires_grad_()
    weight = torch.randn(50, device=device, requires_grad=True)
    grad = torch.randn(50, 3, 6, device=device).permute(2, 1, 0)
    assert_matches_fp64(rms, lambda a, w: reference.rms_norm(a, w, EPS), [x, weight], ROUNDING[torch.float32], [grad])


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_rms_with_a_frozen_input(frozen: str, device: torch.device) -> None:
    x, weight = leaves(torch.randn(11, 72, device=device), torch.randn(72, device=device))
    (x if frozen == "x" else weight).requires_grad_(False)  # noqa: FBT003
    assert_matches_fp64(rms, lambda a, w: reference.rms_norm(a, w, EPS), [x, weight], ROUNDING[torch.float32])


@sampled(("rows", "columns", "dtype"), CASES, every=4)
def test_add_rms_matches_fp64(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
    """Both results are used, as a decoder layer uses them; sum and norm are rounded."""
    sizes = ((rows, columns), (rows, columns), (columns,))
    inputs = leaves(*(torch.randn(size, dtype=dtype, device=device) for size in sizes))
    grads = [torch.randn(rows, columns, dtype=dtype, device=device) for _ in range(2)]
    assert_matches_fp64(
        add_rms, lambda x, r, w: reference.add_rms_norm(x, r, w, EPS), inputs, 2 * ROUNDING[dtype], grads
    )


@pytest.mark.parametrize("wide", ["x", "residual"])
def test_add_rms_of_two_dtypes_is_in_the_wider(wide: str, device: torch.device) -> None:
    """As under autocast: what a product made is narrow, the residual stream is not."""
    narrow = torch.randn(7, 96, device=device, dtype=torch.bfloat16)
    other, weight = torch.randn(7, 96, device=device), torch.randn(96, device=device)
    inputs = leaves(*((other, narrow) if wide == "x" else (narrow, other)), weight)
    outputs = add_rms(*inputs)
    assert all(output.dtype == torch.float32 for output in outputs)
    gradients = torch.autograd.grad(outputs, inputs, [torch.randn(7, 96, device=device) for _ in range(2)])
    assert [gradient.dtype for gradient in gradients] == [value.dtype for value in inputs]
    assert_matches_fp64(add_rms, lambda x, r, w: reference.add_rms_norm(x, r, w, EPS), inputs, ROUNDING[torch.bfloat16])


def test_add_rms_whose_sum_nobody_reads(device: torch.device) -> None:
    inputs = leaves(*(torch.randn(size, device=device) for size in ((9, 64), (9, 64), (64,))))
    assert_matches_fp64(
        lambda *given: add_rms(*given)[0],
        lambda x, r, w: reference.add_rms_norm(x, r, w, EPS)[0],
        inputs,
        2 * ROUNDING[torch.float32],
    )


def test_add_rms_reads_strided_rows(device: torch.device) -> None:
    x = torch.randn(6, 3, 80, device=device)[:, :, :50].requires_grad_()
    residual = torch.randn(3, 6, 50, device=device).transpose(0, 1).requires_grad_()
    weight = torch.randn(50, device=device, requires_grad=True)
    assert_matches_fp64(
        add_rms,
        lambda a, r, w: reference.add_rms_norm(a, r, w, EPS),
        [x, residual, weight],
        2 * ROUNDING[torch.float32],
    )


@sampled(("rows", "columns", "dtype"), CASES, every=4)
def test_layernorm_matches_fp64(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
    sizes = ((rows, columns), (columns,), (columns,))
    inputs = leaves(*(torch.randn(size, dtype=dtype, device=device) for size in sizes))
    grad = torch.randn(rows, columns, dtype=dtype, device=device)
    # the mean of a row may cancel, so twice one rounding
    assert_matches_fp64(layer, lambda *given: reference.layer_norm(*given, EPS), inputs, 2 * ROUNDING[dtype], [grad])


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (1, 2)], ids=str)
def test_layernorm_with_frozen_inputs(frozen: tuple[int, ...], device: torch.device) -> None:
    inputs = leaves(*(torch.randn(size, device=device) for size in ((13, 72), (72,), (72,))))
    for index in frozen:
        inputs[index].requires_grad_(False)  # noqa: FBT003
    assert_matches_fp64(layer, lambda *given: reference.layer_norm(*given, EPS), inputs, 2 * ROUNDING[torch.float32])


def test_layernorm_without_a_bias(device: torch.device) -> None:
    inputs = leaves(torch.randn(13, 72, device=device), torch.randn(72, device=device))
    assert_matches_fp64(
        lambda x, w: layer(x, w, None),
        lambda x, w: reference.layer_norm(x, w, None, EPS),
        inputs,
        2 * ROUNDING[torch.float32],
    )


def test_layernorm_of_rows_far_from_zero(device: torch.device) -> None:
    inputs = leaves(
        1000.0 + torch.randn(4, 300, device=device), torch.randn(300, device=device), torch.zeros(300, device=device)
    )
    # 1000 in fp32 is known to 3e-5 of the deviation
    assert_matches_fp64(layer, lambda *given: reference.layer_norm(*given, EPS), inputs, 1e-4)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_layernorm_of_single_elements_has_no_gradient(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from ligerprof.kernels.norm import triton as rows

    if INTERPRETED:
        # fused with the subtraction, the mean of one product is not rounded: it differs in the last place
        means = rows._row_means

        def unrounded_means(*arguments: Any) -> Any:
            return [mean * (1 + 2**-23) for mean in means(*arguments)]

        monkeypatch.setattr(rows, "_row_means", unrounded_means)
    x, weight, bias = leaves(*(torch.randn(size, device=device) for size in ((37, 1), (1,), (1,))))
    grad = torch.randn(37, 1, device=device)
    grad[5] = float("inf")
    y, dx, dweight, dbias = run(layer, [x, weight, bias], [grad])
    assert torch.equal(y, bias.expand(37, 1))
    # as in torch, infinity minus itself is not a number
    assert dx.isnan().nonzero().tolist() == [[5, 0]]
    assert dx.nan_to_num().count_nonzero() == 0
    assert dweight.isnan()
    assert dbias == float("inf")


def test_weights_that_do_not_fit_are_refused(device: torch.device) -> None:
    with pytest.raises(KernelInputError, match="rms"):
        rms(torch.zeros(2, 8, device=device), torch.zeros(7, device=device))
    with pytest.raises(KernelInputError, match="cannot be added"):
        add_rms(*(torch.zeros(2, size, device=device) for size in (8, 9)), torch.zeros(8, device=device))
    with pytest.raises(KernelInputError, match="layernorm"):
        layer(torch.zeros(2, 8, device=device), torch.zeros(8, device=device), torch.zeros(7, device=device))


@pytest.mark.parametrize("rows", [1, 5, 263, 264, 265, 8192, 16385])
def test_backward_takes_as_few_programs_as_cost_no_turn_more(rows: int) -> None:
    tiles = -(-rows // 2)
    programs = backward_programs(rows=rows, columns=4096, sm_count=132)
    turns = -(-tiles // min(tiles, 132))
    assert -(-tiles // programs) == turns
    assert programs == 1 or -(-tiles // (programs - 1)) > turns


@given(
    rows=st.integers(1, 100_000),
    columns=st.integers(1, MAX_COLUMNS),
    sm_count=st.integers(1, 200),
    # of an RTX 4090, an A100 and an H100
    shared_bytes=st.sampled_from([99 * 1024, 163 * 1024, 227 * 1024]),
    read_bytes=st.integers(2, 12),
)
def test_a_plan_covers_the_rows_and_fits_the_multiprocessor(
    rows: int, columns: int, sm_count: int, shared_bytes: int, read_bytes: int
) -> None:
    for make in (plan_forward, plan_backward):
        plan = make(rows=rows, columns=columns, sm_count=sm_count, shared_bytes=shared_bytes, read_bytes=read_bytes)
        assert plan.block >= columns
        assert 1 <= plan.warps <= 32
        # with the two fp32 statistics of each row
        row_bytes = plan.block * read_bytes + 8
        assert plan.stages == 1 or (plan.stages - 1) * plan.tile_rows * row_bytes < shared_bytes
        tiles = -(-rows // plan.tile_rows)
        assert plan.programs <= tiles
        if make is plan_backward or is_long(columns):
            assert plan.programs == backward_programs(rows=rows, columns=columns, sm_count=sm_count) <= sm_count
        else:
            assert (plan.programs, plan.stages) == (tiles, 1)
