"""Forms of the norms besides the plain ones: optional parameters, a weight per head, castings."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerprof.errors import KernelInputError
from ligerprof.kernels.norm import reference, triton
from tests.kernels.oracle import DTYPES, ROUNDING, assert_matches_fp64, leaves, relative_error, run

EPS = 1e-5
FP32 = ROUNDING[torch.float32]


@pytest.fixture(autouse=True)
def _sums_in_few_programs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes a hundredth of a second per program."""
    if device.type == "cpu":
        monkeypatch.setattr(triton, "_SUM_COLUMNS", 1024)
        monkeypatch.setattr(triton, "_SUM_ROWS", 4)


def kernels() -> Any:
    from ligerprof.kernels.norm import triton

    return triton


def compare(
    name: str, inputs: list[Tensor], order: Callable[..., Any], tolerance: float, grads: list[Tensor] | None = None
) -> None:
    """`order` puts the inputs into a call of the kernel and of the reference."""
    assert_matches_fp64(
        lambda *given: order(getattr(kernels(), name), *given),
        lambda *given: order(getattr(reference, name), *given),
        inputs,
        tolerance,
        grads,
    )


def normal(device: torch.device, *sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return leaves(*(torch.randn(size, device=device).to(dtype) for size in sizes))


@pytest.mark.parametrize("columns", [70, 9000])
def test_rms_with_and_without_its_parameters(columns: int, device: torch.device) -> None:
    x, weight, bias = normal(device, (3, columns), (columns,), (columns,))
    compare("rms_norm", [x], lambda norm, x: norm(x, None, EPS), FP32)
    compare("rms_norm", [x, bias], lambda norm, x, b: norm(x, None, EPS, bias=b), FP32)
    compare("rms_norm", [x, weight, bias], lambda norm, x, w, b: norm(x, w, EPS, 1.0, bias=b), FP32)


@pytest.mark.parametrize("columns", [70, 9000])
def test_layer_norm_without_its_parameters(columns: int, device: torch.device) -> None:
    x, bias = normal(device, (3, columns), (columns,))
    # the gradient of a plain sum of a normalized row is zero
    grads = [torch.randn(3, columns, device=device)]
    compare("layer_norm", [x], lambda norm, x: norm(x, None, None, EPS), 2 * FP32, grads)
    compare("layer_norm", [x, bias], lambda norm, x, b: norm(x, None, b, EPS), 2 * FP32, grads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_weight_for_each_head(dtype: torch.dtype, device: torch.device) -> None:
    x, weight, bias = normal(device, (2, 7, 5, 24), (5, 24), (5, 24), dtype=dtype)
    grad = torch.randn(2, 7, 5, 24, device=device).to(dtype)
    compare("rms_norm", [x, weight], lambda norm, x, w: norm(x, w, EPS), ROUNDING[dtype], [grad])
    compare("rms_norm", [x, weight, bias], lambda norm, x, w, b: norm(x, w, EPS, bias=b), ROUNDING[dtype], [grad])
    compare("layer_norm", [x, weight, bias], lambda norm, x, w, b: norm(x, w, b, EPS), 2 * ROUNDING[dtype], [grad])


def test_a_weight_for_each_head_of_a_sum(device: torch.device) -> None:
    inputs = normal(device, (2, 9, 3, 16), (2, 9, 3, 16), (3, 16))
    grads = list(torch.randn(2, 2, 9, 3, 16, device=device))
    compare("add_rms_norm", inputs, lambda norm, x, r, w: norm(x, r, w, EPS), FP32, grads)


def test_heads_that_are_long_rows(device: torch.device) -> None:
    inputs = normal(device, (2, 2, 9000), (2, 9000))
    compare("rms_norm", inputs, lambda norm, x, w: norm(x, w, EPS), FP32)


@pytest.mark.parametrize("casting", ["gemma", "llama", "none"])
def test_castings_round_as_plain_torch_does(casting: str, device: torch.device) -> None:
    """In fp32 nothing is rounded; in 16 bits the results are those of torch in the same steps."""
    x, weight = normal(device, (6, 90), (90,))
    compare("rms_norm", [x, weight], lambda norm, x, w: norm(x, w, EPS, casting=casting), FP32)
    x, weight = normal(device, (6, 90), (90,), dtype=torch.float16)
    grad = torch.randn(6, 90, device=device).half()
    found = run(lambda x, w: kernels().rms_norm(x, w, EPS, casting=casting), [x, weight], [grad])
    same_steps = run(lambda x, w: reference.rms_norm(x, w, EPS, casting=casting), [x, weight], [grad])
    errors = [relative_error(value, right) for value, right in zip(found, same_steps, strict=True)]
    if casting != "none":
        assert errors[0] < 1e-5
    assert max(errors) < 2 * ROUNDING[torch.float16], errors


def test_llamas_casting_rounds_the_normalized_row(device: torch.device) -> None:
    x, weight = normal(device, (6, 90), (90,), dtype=torch.float16)
    once = kernels().rms_norm(x, weight, EPS)
    twice = kernels().rms_norm(x, weight, EPS, casting="llama")
    wide = x.float()
    # as LlamaRMSNorm of transformers
    normalized = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).half()
    assert torch.equal(twice, weight * normalized)
    assert not torch.equal(once, twice)


def test_a_sum_in_a_dtype_of_its_own(device: torch.device) -> None:
    """The residual stream in fp32, with 16-bit addends."""
    x, residual, weight = normal(device, (5, 64), (5, 64), (64,), dtype=torch.bfloat16)
    y, total = kernels().add_rms_norm(x, residual, weight, EPS, sum_dtype=torch.float32)
    assert (y.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(total, x.float() + residual.float())
    grads = [torch.randn(5, 64, device=device).bfloat16(), torch.randn(5, 64, device=device)]
    found = torch.autograd.grad((y, total), (x, residual, weight), grads)
    assert [grad.dtype for grad in found] == [torch.bfloat16] * 3
    compare(
        "add_rms_norm",
        [x, residual, weight],
        lambda norm, x, r, w: norm(x, r, w, EPS, sum_dtype=torch.promote_types(x.dtype, torch.float32)),
        ROUNDING[torch.bfloat16],
        grads,
    )


@pytest.mark.parametrize("casting", ["llama", "none"])
def test_castings_round_to_the_dtype_of_the_sum(casting: str, device: torch.device) -> None:
    """Of a sum in fp32, nothing but the result is rounded to 16 bits."""
    x, residual, weight = normal(device, (6, 90), (6, 90), (90,), dtype=torch.float16)

    def norm_of(module: Any) -> Tensor:
        return module.add_rms_norm(x, residual, weight, EPS, casting=casting, sum_dtype=torch.float32)[0]

    assert relative_error(norm_of(kernels()), norm_of(reference)) < 1e-5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: kernels().rms_norm(x, torch.ones(3, 8), EPS), "a parameter of shape (3, 8)"),
        (lambda x: kernels().rms_norm(x, torch.ones(2, 8), EPS, bias=torch.ones(8)), "only one of weight and bias"),
        (lambda x: kernels().rms_norm(x, None, EPS, casting="bf16"), "unknown casting 'bf16'"),
        (lambda _: kernels().rms_norm(torch.ones(1, 70000), None, EPS), "70000 columns, more than 65536"),
    ],
)
def test_what_has_no_kernel(call: Callable[[Tensor], Any], message: str, device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("checked before a launch, on any device")
    with pytest.raises(KernelInputError) as raised:
        call(torch.ones(4, 2, 8))
    assert message in str(raised.value)


@pytest.mark.parametrize("columns", [70, 9000])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float16, torch.float32)], ids=str)
def test_layer_norm_with_the_addition(columns: int, dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    x, residual = (normal(device, (3, columns), dtype=dtype)[0] for dtype in dtypes)
    weight, bias = normal(device, (columns,), (columns,))
    grads = list(torch.randn(2, 3, columns, device=device))
    inputs = [x, residual, weight, bias]
    compare("add_layer_norm", inputs, lambda norm, x, r, w, b: norm(x, r, w, b, EPS), 2 * ROUNDING[dtypes[0]], grads)
    with pytest.raises(KernelInputError, match=r"add_layernorm: .* cannot be added"):
        kernels().add_layer_norm(x, residual[:2], weight, bias, EPS)
