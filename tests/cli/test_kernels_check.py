"""`ligerprof kernels check`: ours and a plug-in's kernel pass; whatever a plug-in does wrong is a row."""

import dataclasses
import inspect
import json
import sys
import types
from collections.abc import Callable
from importlib.metadata import EntryPoint
from itertools import cycle
from typing import Any
from unittest.mock import patch

import pytest
import torch
import triton
import triton.language as tl
from click.testing import CliRunner, Result
from torch import Tensor
from torch.nn import functional

from ligerprof.cli.main import main
from ligerprof.errors import KernelUnavailableError
from ligerprof.kernels import registry
from ligerprof.kernels.cross_entropy.reference import cross_entropy
from ligerprof.kernels.options import LossOptions
from ligerprof.kernels.rope.reference import apply_rope
from ligerprof.kernels.spec import KernelSpec
from ligerprof.runs.kernel_check import check as check_module
from ligerprof.runs.kernel_check import check_kernel
from ligerprof.runs.kernel_check.check import CheckRow
from tests.paths import DATA

Kernel = Callable[..., Any]


def check(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["kernels", "check", *arguments])


def rows_of(result: Result) -> list[dict[str, Any]]:
    assert "Traceback" not in result.output
    rows: list[dict[str, Any]] = json.loads(result.stdout)["rows"]
    return rows


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> KernelSpec:
    """The example plug-in, as if it were installed."""
    monkeypatch.syspath_prepend(str(DATA / "plugin"))
    plugin = EntryPoint(name="example", value="ligerprof_example_plugin.spec:SPECS", group="ligerprof.kernels")
    found = registry.build_registry([plugin])
    monkeypatch.setattr(registry, "load_registry", lambda: found)
    return registry.find_kernel("swiglu", "example")


@pytest.fixture
def broken(example: KernelSpec, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Give the example another function, or another spec."""

    def replace(function: Kernel | None = None, **changes: Any) -> None:
        module: Any = types.ModuleType("broken_plugin")
        monkeypatch.setitem(sys.modules, "broken_plugin", module)
        if function is not None:
            module.kernel = function
            changes["entry"] = "broken_plugin:kernel"
        module.SPECS = dataclasses.replace(example, **changes)
        plugin = EntryPoint(name="example", value="broken_plugin:SPECS", group="ligerprof.kernels")
        found = registry.build_registry([plugin])
        monkeypatch.setattr(registry, "load_registry", lambda: found)

    return replace


def test_our_kernel_passes() -> None:
    result = check("swiglu", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["schema"], found["kind"], found["kernel"], found["passed"]) == (1, "kernel_check", "swiglu", True)
    assert {row["check"] for row in found["rows"]} == {
        *("memory", "values", "gradients", "strides", "repeat", "compile", "bytes")
    }
    assert all(row["error"] <= row["bound"] for row in found["rows"] if row["result"] == "pass")
    compiled = [row for row in found["rows"] if row["check"] == "compile"]
    assert [(row["result"], "interpreter" in row["note"]) for row in compiled] == [("skip", True)] * 2


@pytest.mark.parametrize("name", ["swiglu_linear", "geglu_linear"])
def test_declared_bytes_of_a_kernel_that_a_model_lets_overwrite(name: str) -> None:
    with patch.object(check_module, "CASES", ()), patch.object(check_module, "COMPILED", ()):
        rows = check_kernel(registry.find_kernel(name)).rows
    assert {(row.check, str(row.result)) for row in rows} == {("bytes", "pass")}, rows


@pytest.mark.usefixtures("example")
def test_the_example_plug_in_passes_every_row() -> None:
    result = check("swiglu:example", "--json")
    assert result.exit_code == 0, result.output
    results = {(row["case"], row["result"]) for row in rows_of(result) if row["result"] != "pass"}
    assert results == set()


def wrong_gradient(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up + 1e-3 * gate.detach() * up


def wrong_shape(gate: Tensor, up: Tensor) -> Tensor:
    return (functional.silu(gate) * up).sum(-1)


def wants_contiguous(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate.view(-1)).view(gate.shape) * up


def raises(gate: Tensor, up: Tensor) -> Tensor:
    raise ValueError("no \x1b[31mreason\n at all")


def leaves(gate: Tensor, up: Tensor) -> Tensor:
    print("leaving")
    sys.exit(0)


def detached(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate.detach()) * up.detach()


@pytest.mark.parametrize(
    ("kernel", "case", "says"),
    [
        (wrong_gradient, "fp32", ""),
        (wrong_shape, "fp32", "has the shape"),
        (wants_contiguous, "transposed", "view"),
        (raises, "no tokens", "ValueError: no"),
        (leaves, "bf16", "SystemExit: 0"),
        (detached, "fp16", "does not require grad"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_kernel_is_a_failing_row(broken: Callable[..., None], kernel: Kernel, case: str, says: str) -> None:
    broken(kernel)
    result = check("swiglu", "--provider", "example", "--json")
    assert result.exit_code == 1
    (row,) = (row for row in rows_of(result) if row["case"] == case)
    assert row["result"] == "fail"
    assert says in row["note"]
    assert "\x1b" not in row["note"]
    assert says or row["error"] > row["bound"]


def rms(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    wide = x.float() if x.dtype != torch.float64 else x
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (weight + offset)).to(x.dtype)


def own_epsilon(x: Tensor, weight: Tensor, _eps: float, offset: float = 0.0) -> Tensor:
    return rms(x, weight, 1e-5, offset)


def no_offset(x: Tensor, weight: Tensor, eps: float, _offset: float = 0.0) -> Tensor:
    return rms(x, weight, eps)


def dense_weight(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    return rms(x, weight.as_strided(weight.shape, (1,)), eps, offset)


def one_block(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    return torch.cat((rms(x[..., :1024], weight[:1024], eps, offset), x[..., 1024:]), dim=-1)


def few_rows(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    parts = rms(rows[:32], weight, eps, offset), rms(rows[32:], weight.detach(), eps, offset)
    return torch.cat(parts).view(x.shape)


def three_axes(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    _sequences, _tokens, _columns = x.shape
    return rms(x, weight, eps, offset)


def packed_rows(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    if x.stride(-1) == 1:
        x = x.as_strided(x.shape, (x.shape[-2] * x.shape[-1], x.shape[-1], 1)[-x.dim() :]) if x.dim() < 4 else x
    return rms(x, weight, eps, offset)


def half_squares(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    overflows = x.half().square().sum(-1, keepdim=True).isinf()
    return rms(x, weight, eps, offset).masked_fill(overflows, 0.0)


def pairs_of_columns(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    y, even = rms(x, weight, eps, offset), x.shape[-1] // 2 * 2
    return torch.cat((y[..., :even], torch.zeros_like(y[..., even:])), dim=-1)


def unwritten_memory(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    y = rms(x, weight, eps, offset)
    return y + 0.0 * torch.empty_like(y)


def wide_output(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    return rms(x.float(), weight, eps, offset)


def one_dtype(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    assert x.dtype == weight.dtype
    return rms(x, weight, eps, offset)


def changes_its_input(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    y = rms(x, weight, eps, offset)
    x.detach().add_(1.0)
    return y


_NOISE = cycle((1.0, 1.000001, 1.000002))


def noisy(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    return rms(x, weight, eps, offset) * next(_NOISE)


class _OverGradient(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        kept = grad.clone()
        grad.zero_()
        return kept


def over_the_gradient(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    return _OverGradient.apply(rms(x, weight, eps, offset))  # type: ignore[no-any-return,no-untyped-call]


class _OneBuffer(torch.autograd.Function):
    buffers: dict[Any, Tensor] = {}  # noqa: RUF012 - the bug

    @staticmethod
    def forward(_ctx: Any, y: Tensor) -> Tensor:
        return _OneBuffer.buffers.setdefault((y.shape, y.dtype), torch.empty_like(y)).copy_(y)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return grad


def one_buffer(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    return _OneBuffer.apply(rms(x, weight, eps, offset))  # type: ignore[no-any-return,no-untyped-call]


def loss(logits: Tensor, labels: Tensor, options: LossOptions, num_items: float | None = None) -> Tensor:
    return cross_entropy(logits, labels, options, num_items)


def own_ignored_label(logits: Tensor, labels: Tensor, options: LossOptions, num_items: float | None = None) -> Tensor:
    return loss(logits, labels, dataclasses.replace(options, ignore_index=-100), num_items)


def unshifted(logits: Tensor, labels: Tensor, options: LossOptions, num_items: float | None = None) -> Tensor:
    return loss(logits, labels, dataclasses.replace(options, shift=False), num_items)


def uncapped(logits: Tensor, labels: Tensor, options: LossOptions, num_items: float | None = None) -> Tensor:
    return loss(logits, labels, dataclasses.replace(options, softcap=None), num_items)


def unscaled(logits: Tensor, labels: Tensor, options: LossOptions, num_items: float | None = None) -> Tensor:
    return loss(logits, labels, dataclasses.replace(options, logit_scale=1.0), num_items)


def own_count(logits: Tensor, labels: Tensor, options: LossOptions, _num_items: float | None = None) -> Tensor:
    return loss(logits, labels, options)


@pytest.mark.parametrize(
    ("kernel", "cases"),
    [
        (rms, set()),
        (own_epsilon, {"epsilon and offset"}),
        (no_offset, {"epsilon and offset"}),
        (dense_weight, {"weights with gaps"}),
        (one_block, {"fp32, wide rows", "between NaN, wide rows"}),
        (few_rows, {"fp32, many rows"}),
        (packed_rows, {"rows with gaps", "expanded"}),
        (half_squares, {"fp16, large values"}),
        (pairs_of_columns, {"fp32, odd sizes", "between NaN"}),
        (three_axes, {"fp32, one more axis"}),
        (wide_output, {"bf16", "fp16", "fp16, large values", "bf16, fp32 weights"}),
        (one_dtype, {"bf16, fp32 weights"}),
        (noisy, {"three calls"}),
        (one_buffer, {"three calls"}),
        (loss, set()),
        (own_ignored_label, {"ignored label"}),
        (unshifted, {"shifted labels"}),
        (uncapped, {"softcap"}),
        (unscaled, {"logit scale"}),
        (own_count, {"number of items"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_bug_fails_the_row_that_looks_for_it(kernel: Kernel, cases: set[str]) -> None:
    name = "rms" if "eps" in "".join(inspect.signature(kernel).parameters) else "ce"
    assert {row.case for row in failing_rows(name, kernel)} == cases


@pytest.mark.parametrize(
    ("kernel", "says"),
    [(changes_its_input, "writes over its input hidden"), (over_the_gradient, "writes over the gradient")],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_writing_over_memory_of_others_fails(kernel: Kernel, says: str) -> None:
    rows = failing_rows("rms", kernel)
    assert "fp32" in {row.case for row in rows}
    assert any(says in row.note for row in rows)


@triton.jit
def _copy_kernel(x_ptr, y_ptr, elements, READS: tl.constexpr, WRITES: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < elements
    value = tl.load(x_ptr + offsets, mask=inside | READS, other=0.0)
    tl.store(y_ptr + offsets, value + 0.0 * tl.sum(value), mask=inside | WRITES)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor, reads: bool, writes: bool) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        _copy_kernel[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), READS=reads, WRITES=writes, BLOCK=256)
        return y

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


@pytest.mark.parametrize(
    ("reads", "writes", "says"),
    [
        (False, False, None),
        (True, False, "hidden has NaN: it reads beyond a tensor"),
        (False, True, "ValueError: it writes outside of a tensor of the sizes [3, 3, 37] that it allocates"),
    ],
    ids=["right", "reads", "writes"],
)
def test_memory_beyond_a_tensor(reads: bool, writes: bool, says: str | None) -> None:
    def copying(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        return rms(_Copy.apply(x, reads, writes), weight, eps, offset)  # type: ignore[no-untyped-call]

    rows = checked_rows("rms", copying)
    if says is None:
        assert [row for row in rows if row.result == "fail"] == []
        return
    assert (rows[0].check, rows[0].result) == ("memory", "fail")
    assert says.removeprefix("hidden ") in rows[0].note
    if writes:
        # in the interpreter, they would overwrite memory of this process
        assert {str(row.result) for row in rows[1:] if row.check != "bytes"} == {"skip"}


def test_memory_that_was_not_written() -> None:
    # what it holds in the other rows is chance
    rows = [row for row in failing_rows("rms", unwritten_memory) if row.check == "memory"]
    assert all("has NaN: it reads beyond a tensor, or memory that it did not write" in row.note for row in rows)
    assert len(rows) == 2


def test_writing_over_an_input_unseen_by_autograd() -> None:
    def unseen(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        rotated = apply_rope(q, k, cos, sin, unsqueeze_dim)
        k.data.copy_(rotated[1].detach())
        return rotated

    rows = [row for row in failing_rows("rope", unseen) if row.check == "memory"]
    assert all("forward writes over keys without a new version" in row.note for row in rows)
    assert len(rows) == 2


def test_an_option_that_a_kernel_refuses_is_no_failure() -> None:
    def refuses(logits: Tensor, labels: Tensor, options: LossOptions, num_items: float | None = None) -> Tensor:
        if options.logit_scale != 1.0:
            raise KernelUnavailableError("no logit scale")
        return loss(logits, labels, options, num_items)

    rows = checked_rows("ce", refuses)
    assert [(row.case, row.note) for row in rows if row.result != "pass"][:2] == [
        ("logit scale", "refused: no logit scale"),
        ("expanded", "the kernel may write over these inputs"),
    ]


def checked_rows(name: str, kernel: Kernel) -> tuple[CheckRow, ...]:
    module = types.ModuleType("planted_bugs")
    module.kernel = kernel  # type: ignore[attr-defined]
    spec = dataclasses.replace(registry.find_kernel(name, "torch"), entry="planted_bugs:kernel")
    # patch.dict would also drop the modules that torch imports in the meantime
    sys.modules["planted_bugs"] = module
    with patch.object(check_module, "COMPILED", ()):
        return check_kernel(spec).rows


def failing_rows(name: str, kernel: Kernel) -> list[CheckRow]:
    return [row for row in checked_rows(name, kernel) if row.result == "fail"]


def test_a_graph_break_fails_the_compilation(broken: Callable[..., None]) -> None:
    def breaks(gate: Tensor, up: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return functional.silu(gate) * up

    broken(breaks)
    rows = rows_of(check("swiglu:example", "--json"))
    assert {row["check"] for row in rows if row["result"] == "fail"} >= {"compile"}
    assert all(row["result"] == "pass" for row in rows if row["check"] == "values")


def test_bytes_that_were_not_declared_fail(broken: Callable[..., None], example: KernelSpec) -> None:
    assert example.memory is not None
    memory = example.memory
    broken(memory=lambda shape: dataclasses.replace(memory(shape), forward_temporary_bytes=0))
    result = check("swiglu:example")
    assert result.exit_code == 1
    assert "25 pass, 1 fail" in result.stdout
    (row,) = (row for row in rows_of(check("swiglu:example", "--json")) if row["result"] == "fail")
    assert (row["tensor"], row["note"]) == ("forward_temporary", "67,108,864 allocated, 0 declared")


@pytest.mark.parametrize(
    ("kept", "says"),
    [
        (("gate",), "gate+up kept, gate declared"),
        ((), "gate+up kept, none declared"),
        (("gate", "x"), "x is declared, and the inputs are gate, up"),
    ],
)
def test_kept_inputs_that_were_not_declared_fail(
    broken: Callable[..., None], example: KernelSpec, kept: tuple[str, ...], says: str
) -> None:
    assert example.memory is not None
    memory = example.memory
    broken(memory=lambda shape: dataclasses.replace(memory(shape), kept_inputs=kept))
    with patch.object(check_module, "CASES", ()), patch.object(check_module, "COMPILED", ()):
        rows = check_kernel(registry.find_kernel("swiglu", "example")).rows
    (row,) = (row for row in rows if row.result == "fail")
    assert (row.check, row.tensor) == ("bytes", "kept inputs")
    assert row.note.startswith(says)


def test_declared_bytes_of_every_kernel_of_ours() -> None:
    for spec in registry.BUILT_IN:
        if spec.provider != "ligerprof":
            continue
        with patch.object(check_module, "CASES", ()), patch.object(check_module, "COMPILED", ()):
            rows = check_kernel(spec).rows
        assert {(row.check, str(row.result)) for row in rows} == {("bytes", "pass")}, (spec.name, rows)


def test_predicates_that_fail_or_refuse(broken: Callable[..., None]) -> None:
    def fails(_device_kind: str) -> str | None:
        raise RuntimeError("no such device")

    for reason, says in ((fails, "RuntimeError: no such device"), (lambda _kind: "needs a GPU", "needs a GPU")):
        broken(unavailable_reason=reason)
        result = check("swiglu:example")
        assert result.exit_code == 1
        assert f"kernel swiglu of example: {says}" in result.stderr


@pytest.mark.parametrize("entry", ["no_such_module:kernel", "broken_plugin:missing"])
@pytest.mark.parametrize("role", ["entry", "reference"])
def test_a_function_that_cannot_be_imported_is_one_line(broken: Callable[..., None], entry: str, role: str) -> None:
    broken(**{role: entry})
    result = check("swiglu:example")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {entry} cannot be imported: ")
    assert result.stderr.count("\n") == 1


def test_an_unknown_kernel_is_one_line() -> None:
    result = check("swiglue")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: provider 'ligerprof' has no kernel 'swiglue'")


@pytest.mark.parametrize("name", ["rms", "layernorm", "swiglu", "ce"])
def test_bytes_of_another_providers_kernel_are_those_on_a_gpu(name: str) -> None:
    pytest.importorskip("liger_kernel")
    spec = registry.find_kernel(name, "liger")
    rows = [row for row in check_kernel(spec).rows if row.check == "bytes"]
    assert [row.note for row in rows if row.result.value != "pass"] == []
    assert len(rows) == 5
