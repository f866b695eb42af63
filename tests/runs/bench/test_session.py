"""The whole bench on a fake machine: real kernels on the CPU, made-up times."""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from ligerprof.runs.bench.accuracy import RUNS_PER_TURN, Repetitions
from ligerprof.runs.bench.operations import OPERATIONS
from ligerprof.runs.bench.records import Direction, ErrorRecord, HostRecord, MissingRecord, Record, TimeRecord
from ligerprof.runs.bench.session import BenchPlan, CudaMachine, Run, run_bench, three_products

# Triton interprets the loss row by row
TOKENS = 2
PLAN = BenchPlan(
    kernels=("flce", "rms"),
    providers=("torch", "ligerprof", "absent"),
    shapes=f"tiny@{TOKENS}",
    dtype="fp32",
    repetitions=Repetitions(least=1, most=1, settle_seconds=0.0),
)


class CountingClock:
    """Each timed run takes one second longer than the one before."""

    seconds = 0.0

    def time(self, run: Callable[[], object], *, head_start: bool) -> Callable[[], float]:
        run()
        self.seconds += 1.0
        taken = self.seconds
        return lambda: taken

    def now(self) -> float:
        return self.seconds


class PaperMachine:
    """The CPU with made-up figures."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.clock = CountingClock()
        self.released = 0
        self.copied: list[int] = []

    def copy(self, moved_bytes: int) -> Run:
        self.copied.append(moved_bytes)
        return lambda: None

    def extra_peak_bytes(self, run: Run) -> int:
        run()
        return 4096

    def host_seconds(self, run: Run) -> float:
        run()
        return 1e-4

    def synchronizations(self, run: Run) -> tuple[int, str | None]:
        run()
        return 2, "called a synchronizing CUDA operation"

    def release(self) -> None:
        self.released += 1

    def environment(self) -> dict[str, str]:
        return {"gpu": "paper", "torch": torch.__version__}


def records_of(plan: BenchPlan) -> list[Record]:
    findings = list(run_bench(plan, PaperMachine(), lambda _: None))
    assert all(finding.environment["gpu"] == "paper" for finding in findings)
    return [finding.record for finding in findings]


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return records_of(PLAN)


def test_every_provider_has_a_time_for_every_pass(records: list[Record]) -> None:
    times = [record for record in records if isinstance(record, TimeRecord)]
    assert {(r.subject.kernel, r.subject.provider, r.direction) for r in times} == {
        (kernel, provider, direction)
        for kernel in PLAN.kernels
        for provider in ("torch", "ligerprof")
        for direction in Direction
    }
    for record in times:
        assert record.low_seconds <= record.median_seconds <= record.high_seconds
        assert (record.repetitions, record.extra_peak_bytes) == (RUNS_PER_TURN, 4096)


def test_floors_are_timed_beside_the_kernels(records: list[Record]) -> None:
    times = [record for record in records if isinstance(record, TimeRecord)]
    floors = {(record.subject.kernel, record.direction): record.floor for record in times}
    assert floors == {
        ("flce", Direction.FORWARD): "",
        ("flce", Direction.BACKWARD): "",
        ("flce", Direction.FULL): "products",
        ("rms", Direction.FORWARD): "copy",
        ("rms", Direction.BACKWARD): "copy",
        ("rms", Direction.FULL): "copy",
    }
    for record in times:
        if record.floor_seconds is None:
            assert record.floor_share is None
        else:
            assert record.floor_share == pytest.approx(record.floor_seconds / record.median_seconds)
    # in turns: the medians of the two kernels and the copies lie within a round of each other
    forward = [record for record in times if record.subject.kernel == "rms" and record.direction is Direction.FORWARD]
    one_round = 4 * RUNS_PER_TURN
    assert abs(forward[0].median_seconds - forward[1].median_seconds) <= one_round
    assert abs((forward[0].floor_seconds or 0.0) - forward[0].median_seconds) <= one_round
    moved = 2 * TOKENS * 96 * 4
    for record in forward:
        rate = moved / record.median_seconds
        large_copy_seconds = 2 * 2**30 * (record.copy_rate_share or 0.0) / rate
        assert abs(large_copy_seconds - record.median_seconds) <= one_round
    assert all(record.copy_rate_share is None for record in times if record.floor != "copy")


def test_copies_move_what_the_operation_must() -> None:
    machine = PaperMachine()
    plan = dataclasses.replace(PLAN, kernels=("rms",), providers=("torch",), errors=False, host=False)
    list(run_bench(plan, machine, lambda _: None))
    plane = TOKENS * 96 * 4
    assert [count for count in machine.copied if count != 2 * 2**30] == [2 * plane, 3 * plane, 5 * plane]


def test_errors_host_costs_and_the_missing_are_told(records: list[Record]) -> None:
    errors = [record for record in records if isinstance(record, ErrorRecord)]
    assert {(r.subject.kernel, r.subject.provider) for r in errors} == {
        (kernel, provider) for kernel in PLAN.kernels for provider in ("torch", "ligerprof")
    }
    assert all(record.error < 5e-6 for record in errors)
    hosts = [record for record in records if isinstance(record, HostRecord)]
    assert {(r.subject.kernel, r.subject.provider, r.subject.shape) for r in hosts} == {
        (kernel, provider, "tiny") for kernel in PLAN.kernels for provider in ("torch", "ligerprof")
    }
    assert all((r.host_seconds, r.synchronizations) == (1e-4, 2) for r in hosts)
    missing = [record for record in records if isinstance(record, MissingRecord)]
    assert [(r.subject.kernel, r.subject.provider, "absent" in r.reason) for r in missing] == [
        ("flce", "absent", True),
        ("rms", "absent", True),
    ]


def test_a_kernel_that_fails_is_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 7 TiB")

    monkeypatch.setattr("ligerprof.kernels.norm.triton.rms_norm", fail)
    plan = dataclasses.replace(PLAN, kernels=("rms",), providers=("ligerprof", "torch"), host=False)
    found = records_of(plan)
    reasons = {r.subject.provider: r.reason for r in found if isinstance(r, MissingRecord)}
    assert reasons == {"ligerprof": "OutOfMemoryError: CUDA out of memory. Tried to allocate 7 TiB"}
    assert {r.subject.provider for r in found if isinstance(r, (TimeRecord, ErrorRecord))} == {"torch"}


def test_no_provider_left_is_not_a_failure() -> None:
    plan = dataclasses.replace(PLAN, kernels=("rms",), providers=("absent",))
    assert [record.what for record in records_of(plan)] == ["missing"]


def test_errors_have_their_baseline_though_torch_is_not_asked_for() -> None:
    plan = dataclasses.replace(PLAN, kernels=("rms",), providers=("ligerprof",), host=False)
    errors = [record for record in records_of(plan) if isinstance(record, ErrorRecord)]
    assert {record.subject.provider for record in errors} == {"ligerprof"}
    assert all(record.eager_error > 0 for record in errors)


def test_the_floor_of_the_fused_loss_is_its_three_products() -> None:
    hidden, weight = torch.randn(6, 4), torch.randn(9, 4)
    with torch.profiler.profile(record_shapes=True) as profile:
        three_products(hidden.requires_grad_(), weight.requires_grad_())()
    products = [event.input_shapes[:2] for event in profile.events() if event.name == "aten::mm"]
    assert products == [[[6, 4], [4, 9]], [[6, 9], [9, 4]], [[9, 6], [6, 4]]]


@pytest.mark.gpu
def test_the_cuda_machine_sees_waits_memory_and_time() -> None:
    machine = CudaMachine()
    value = torch.ones(2**20, device=machine.device)
    assert machine.synchronizations(lambda: value * 2) == (0, None)
    count, message = machine.synchronizations(lambda: (value.sum().item(), value.max().item()))
    assert (count, message is not None and "synchroniz" in message) == (2, True)
    assert machine.extra_peak_bytes(lambda: value * 2) == 4 * 2**20
    assert 0 < machine.host_seconds(lambda: value * 2) < 1e-3
    copy = machine.copy(2**30)
    copy()
    seconds = machine.clock.time(copy, head_start=False)()
    assert 1e11 < 2**30 / seconds < 2e13
    # the first launch loads the kernel
    value[:1].add_(1)
    # launches do not wait for the host: two tiny kernels with the host asleep between their launches would show
    assert machine.clock.time(lambda: value[:1].add_(1), head_start=True)() < 1e-4
    assert set(machine.environment()) >= {"gpu", "date", "torch", "triton", "liger-kernel", "cut-cross-entropy"}


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", sorted(OPERATIONS))
def test_bench_runs_on_the_gpu(kernel: str) -> None:
    plan = BenchPlan(kernels=(kernel,), shapes="llama3.2-1b@256", repetitions=Repetitions(least=2, most=2))
    found = [finding.record for finding in run_bench(plan, CudaMachine(), lambda _: None)]
    times = {record.subject.provider for record in found if isinstance(record, TimeRecord)}
    missing = {record.subject.provider: record.reason for record in found if isinstance(record, MissingRecord)}
    assert {"torch", "torch-compile"} <= times
    assert "ligerprof" in times or "no kernel" in missing["ligerprof"]
    waits = [r for r in found if isinstance(r, HostRecord) and r.subject.provider == "ligerprof"]
    assert all(record.synchronizations == 0 for record in waits)
