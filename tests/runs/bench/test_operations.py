"""The table of operations against fp64, and what each provider of them answers."""

import dataclasses

import pytest
import torch

from ligerprof.kernels.linear_cross_entropy.plan import plan_chunks
from ligerprof.kernels.options import LossOptions
from ligerprof.kernels.registry import list_kernels
from ligerprof.runs.bench.accuracy import (
    REGIMES,
    BoundCall,
    Regime,
    error_shape,
    make_regime_inputs,
    make_tensors,
    measure_errors,
    relative_error,
    same_chunks,
)
from ligerprof.runs.bench.operations import OPERATIONS, Maker, Provided, find_provided, provider_names
from ligerprof.runs.bench.records import BENCH_KERNELS, BenchShape, Direction, ErrorRecord, find_shapes

# no size is a multiple of a block
SMALL = BenchShape(
    name="small", sequences=2, seq_len=5, hidden=24, intermediate=37, vocab=101, heads=4, kv_heads=2, head_dim=6
)
FP32_ERROR = 5e-6


def maker(dtype: torch.dtype = torch.float32, seed: int = 0) -> Maker:
    return Maker(dtype=dtype, generator=torch.Generator().manual_seed(seed))


def errors_of(kernel: str, provider: str) -> list[ErrorRecord]:
    found, missing = find_provided(kernel, (provider, "torch"), "cpu")
    assert missing == []
    records = list(measure_errors(OPERATIONS[kernel], SMALL, found[:1], found[1], maker()))
    assert all(isinstance(record, ErrorRecord) for record in records)
    return [record for record in records if isinstance(record, ErrorRecord)]


def test_every_kernel_has_an_operation_and_every_operation_a_kernel() -> None:
    assert tuple(OPERATIONS) == BENCH_KERNELS
    assert {kernel.slot for kernel in list_kernels()} <= set(BENCH_KERNELS)


@pytest.mark.parametrize("kernel", BENCH_KERNELS)
def test_torch_is_as_exact_as_its_dtype(kernel: str) -> None:
    records = errors_of(kernel, "torch")
    assert {record.tensor for record in records} == set(OPERATIONS[kernel].result_names)
    assert max(record.error for record in records) < FP32_ERROR
    assert all(record.ratio in (1.0, None) for record in records)


@pytest.mark.parametrize("kernel", [kernel for kernel in BENCH_KERNELS if kernel != "flce"])
def test_our_kernels_are_as_exact_as_their_dtype(kernel: str) -> None:
    records = errors_of(kernel, "ligerprof")
    assert {record.tensor for record in records} == set(OPERATIONS[kernel].result_names)
    assert max(record.error for record in records) < FP32_ERROR


@pytest.mark.parametrize("provider", ["ligerprof", "ligerprof:fp32", "ligerprof:16KiB+fp32"])
def test_our_fused_loss_is_as_exact_as_its_dtype_in_every_regime(provider: str) -> None:
    records = errors_of("flce", provider)
    assert {record.regime for record in records} == {regime.name for regime in REGIMES}
    assert max(record.error for record in records) < FP32_ERROR


def test_errors_tell_a_wrong_kernel_from_a_right_one() -> None:
    (eager,), _ = find_provided("swiglu", ("torch",), "cpu")
    wrong = Provided(name="wrong", kernel=lambda gate, up: 1.01 * eager.kernel(gate, up), options=eager.options)
    broken = Provided(name="broken", kernel=lambda gate, up: gate / 0 * up, options=eager.options)
    records = list(measure_errors(OPERATIONS["swiglu"], SMALL, [wrong, broken], eager, maker()))
    output = {r.subject.provider: r.error for r in records if isinstance(r, ErrorRecord) and r.tensor == "output"}
    assert output["wrong"] == pytest.approx(0.01, rel=1e-3)
    assert output["broken"] == float("inf")


def test_relative_error_is_frobenius() -> None:
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert relative_error(torch.tensor([3.0, 4.5]), exact) == pytest.approx(0.1)


@pytest.mark.parametrize("regime", REGIMES, ids=lambda regime: regime.name)
def test_logits_are_distributed_as_the_regime_says(regime: Regime) -> None:
    shape = dataclasses.replace(SMALL, sequences=1, seq_len=400, hidden=256, vocab=2000)
    inputs = make_regime_inputs(regime, shape, maker())
    logits = inputs["hidden"] @ inputs["weight"].t()
    spread = logits - logits.mean(dim=0) - logits.mean(dim=1, keepdim=True) + logits.mean()
    assert spread.std().item() == pytest.approx(regime.std, rel=0.05)
    assert logits.mean().item() == pytest.approx(regime.offset, abs=1.0)
    chances = torch.softmax(logits, dim=-1)
    expected = (chances * chances).sum(-1).mean().item() if regime.sampled else 1 / shape.vocab
    chosen = chances.gather(1, inputs["labels"][:, None]).mean().item()
    assert chosen == pytest.approx(expected, rel=0.35)


@pytest.mark.parametrize("provider", ["ligerprof:lean", "ligerprof", "ligerprof:1GiB", "ligerprof:4GiB"])
@pytest.mark.parametrize("name", ["A", "B", "C", "llama3.1-70b"])
def test_errors_are_measured_with_the_real_shapes_chunks(provider: str, name: str) -> None:
    (shape,) = find_shapes("flce", name)
    found, _ = find_provided("flce", (provider,), "cpu")
    forced, chunks = same_chunks(found[0], shape, error_shape("flce", shape), 2)
    real = plan_chunks(
        tokens=shape.tokens, hidden=shape.hidden, vocab=shape.vocab, element_bytes=2, budget=found[0].options.budget
    )
    assert chunks == real.chunks
    assert isinstance(forced.options.budget, int)


@pytest.mark.parametrize("kernel", BENCH_KERNELS)
def test_calls_can_be_repeated_though_kernels_write_over_inputs_and_gradients(kernel: str) -> None:
    operation = OPERATIONS[kernel]
    (eager,), _ = find_provided(kernel, ("torch",), "cpu")
    tensors = make_tensors(operation, SMALL, maker())
    call = BoundCall(operation, eager, tensors)
    right = call.results()
    with torch.no_grad():
        for value in (*(tensors.inputs[name] for name in operation.wants), *tensors.gradients):
            value.fill_(7.0)
    assert not torch.equal(call.full()[0], right[len(operation.outputs)])
    again = call.results()
    assert all(torch.equal(first, second) for first, second in zip(right, again, strict=True))


@pytest.mark.parametrize("direction", Direction)
def test_what_is_timed_is_what_it_is_called(direction: Direction) -> None:
    steps: list[str] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            steps.append("forward")
            return gate * up

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            steps.append("backward")
            return gradient, gradient

    operation = OPERATIONS["swiglu"]
    provided = Provided(name="watched", kernel=Watched.apply, options=LossOptions())
    candidate = BoundCall(operation, provided, make_tensors(operation, SMALL, maker())).candidate(direction)
    candidate.prepare()
    prepared = len(steps)
    candidate.run()
    timed = {"forward": ["forward"], "backward": ["backward"], "full": ["forward", "backward"]}
    assert steps[prepared:] == timed[direction.value]


@pytest.mark.parametrize("kernel", BENCH_KERNELS)
def test_every_provider_is_found_or_has_a_reason(kernel: str) -> None:
    found, missing = find_provided(kernel, None, "cpu")
    named = [provided.name for provided in found] + [name for name, reason in missing if reason]
    assert sorted(named) == sorted(provider_names(kernel))
    assert {"ligerprof", "torch", "torch-compile", "liger"} <= set(named)
    assert ({"cce", "torch-linear-ce"} <= set(named)) == (kernel == "flce")


@pytest.mark.parametrize(
    ("kernel", "provider", "says"),
    [
        ("rms", "absent", "absent"),
        ("rms", "cce", "only flce"),
        ("rms", "torch:fast", "variant"),
        ("rms", "ligerprof:lean", "variant"),
        ("flce", "ligerprof:plenty", "not a size"),
        ("flce", "torch-linear-ce:fast", "variant"),
    ],
)
def test_who_is_not_there_is_told_with_the_reason(kernel: str, provider: str, says: str) -> None:
    found, missing = find_provided(kernel, (provider,), "cpu")
    assert found == []
    ((name, reason),) = missing
    assert (name, says in reason) == (provider, True)


@pytest.mark.slow
def test_torch_compile_computes_what_torch_does() -> None:
    records = errors_of("rms", "torch-compile")
    assert max(record.error for record in records) < FP32_ERROR
