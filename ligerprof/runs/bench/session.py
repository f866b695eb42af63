"""Run the measurements of a benchmark on one device; each provider gets a result, or a reason why it has none."""

import functools
import gc
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from ligerprof.errors import MissingDependencyError
from ligerprof.runs.bench import accuracy, records
from ligerprof.runs.bench.operations import DTYPES, OPERATIONS, Maker, Operation, Tensors, find_provided
from ligerprof.runs.outcome import Progress
from ligerprof.runs.recording.device import NvmlDevice
from ligerprof.units import GIB, MIB
from ligerprof.version import __version__

# several times any L2 cache
_FLUSHED_BYTES = 256 * MIB
# about a millisecond in which the host gets ahead, so that no launch delays the device
_HEAD_START_CYCLES = 2_000_000
_HOST_CALLS = 20
_HOST_BATCHES = 11
_PACKAGES = ("torch", "triton", "liger-kernel", "cut-cross-entropy")

Run = Callable[[], object]


class CudaClock:
    """CUDA events around work; the cache is flushed before, unless that is unwanted, and launches are queued ahead."""

    def __init__(self, *, flush: bool = True) -> None:
        self._scratch = torch.empty(_FLUSHED_BYTES if flush else 0, dtype=torch.uint8, device="cuda")

    def time(self, run: Run, *, head_start: bool) -> Callable[[], float]:
        """Queue `run`, after a flush of the cache; the returned function waits for its end."""
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        if self._scratch.numel():
            self._scratch.zero_()
        if head_start:
            torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
        started.record()
        run()
        ended.record()

        def read() -> float:
            ended.synchronize()
            return float(started.elapsed_time(ended)) / 1000

        return read

    def now(self) -> float:
        """Wall-clock seconds."""
        return time.perf_counter()


class CudaMachine:
    """The current CUDA device; creating it raises MissingDependencyError without one."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise MissingDependencyError(
                "bench: torch finds no CUDA device, and times on a CPU would be meaningless."
                " Run it on a GPU, or show earlier results with --from FILE."
            )
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.clock: accuracy.Clock = CudaClock()

    def copy(self, moved_bytes: int) -> Run:
        """A copy on the device that reads and writes `moved_bytes` in total."""
        source = torch.randint(256, (moved_bytes // 2,), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    def extra_peak_bytes(self, run: Run) -> int:
        """The highest allocated bytes during `run`, minus those before it."""
        self.release()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        # held until it is counted
        kept = run()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        del kept
        return peak - before

    def conditions(self) -> dict[str, int | float]:
        """The chip's clock, power and temperature now, as far as the driver reports them."""
        return {} if self._nvml is None else self._nvml.conditions()

    @functools.cached_property
    def _nvml(self) -> NvmlDevice | None:
        return NvmlDevice.find(f"GPU-{torch.cuda.get_device_properties(self.device).uuid}")

    def host_seconds(self, run: Run) -> float:
        """The host's median time per call to launch a batch of calls; the device is idle before each batch."""
        seconds = []
        for _ in range(_HOST_BATCHES):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(_HOST_CALLS):
                run()
            seconds.append((time.perf_counter() - started) / _HOST_CALLS)
        torch.cuda.synchronize()
        return sorted(seconds)[_HOST_BATCHES // 2]

    def synchronizations(self, run: Run) -> tuple[int, str | None]:
        """How often the host waits for the device in `run`, and torch's message about the first wait.

        Torch's sync debug mode is set to `error`; if that raises, the warnings under `warn` are counted.
        """
        torch.cuda.synchronize()
        before = torch.cuda.get_sync_debug_mode()
        try:
            torch.cuda.set_sync_debug_mode("error")
            run()
        except RuntimeError as error:
            return self._count_waits(run), str(error).splitlines()[0]
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return 0, None

    def _count_waits(self, run: Run) -> int:
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
        return max(1, sum("synchronizing CUDA operation" in str(warning.message) for warning in caught))

    def release(self) -> None:
        """Collect cycles and release cached memory."""
        gc.collect()
        torch.cuda.empty_cache()

    def environment(self) -> dict[str, str]:
        """GPU, CUDA, Python, packages, date in UTC."""
        versions = {"ligerprof": __version__, "cuda": str(torch.version.cuda), "python": platform.python_version()}
        for package in _PACKAGES:
            try:
                versions[package] = version(package)
            except PackageNotFoundError:
                versions[package] = "missing"
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return {"gpu": torch.cuda.get_device_name(self.device), "date": now, **versions}


_FLOOR, _LARGE_COPY = "floor", "large copy"
_LARGE_COPY_BYTES = 2 * GIB
_WARM_UP_CALLS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchPlan:
    """The measurements to run: `providers` None for all, `shapes` as of --shapes, `dtype` bf16, fp16 or fp32."""

    kernels: tuple[str, ...]
    providers: tuple[str, ...] | None = None
    shapes: str = "study"
    directions: tuple[records.Direction, ...] = tuple(records.Direction)
    dtype: str = "bf16"
    repetitions: accuracy.Repetitions = field(default_factory=accuracy.Repetitions)
    errors: bool = True
    host: bool = True


def run_bench(plan: BenchPlan, machine: CudaMachine, progress: Progress) -> Iterator[records.Finding]:
    """Run the measurements; yields each finding."""
    environment = machine.environment()
    for kernel in plan.kernels:
        for record in _run_kernel(OPERATIONS[kernel], plan, machine, progress):
            yield records.Finding(record=record, environment=environment)


def _run_kernel(
    operation: Operation, plan: BenchPlan, machine: CudaMachine, progress: Progress
) -> Iterator[records.Record]:
    for shape in records.find_shapes(operation.name, plan.shapes):
        progress(f"{operation.name} {shape.name}: {operation.sizes(shape)} {plan.dtype}")
        yield from _Bench(operation, shape, plan, machine).run()
        machine.release()
    if plan.host:
        progress(f"{operation.name}: the host's cost")
        yield from _Bench(operation, records.TINY, plan, machine).run_host()
        machine.release()


class _Bench:
    """One kernel at one shape, for every provider, on the same tensors."""

    def __init__(self, operation: Operation, shape: records.BenchShape, plan: BenchPlan, machine: CudaMachine) -> None:
        self._operation, self._shape, self._plan, self._machine = operation, shape, plan, machine
        self._dtype = DTYPES[plan.dtype]
        self._found, self._missing = find_provided(operation.name, plan.providers, machine.device.type)

    def run(self) -> Iterator[records.Record]:
        yield from self._run_times()
        self._machine.release()
        if self._plan.errors:
            yield from self._run_errors()
        yield from (records.MissingRecord(subject=self._subject(name), reason=reason) for name, reason in self._missing)

    def run_host(self) -> Iterator[records.HostRecord]:
        """The host's cost of each call; missing providers are reported for the real shapes."""
        for call in self._usable_calls(self._make_tensors()):
            count, message = self._machine.synchronizations(call.full)
            yield records.HostRecord(
                subject=self._subject(call.name),
                host_seconds=self._machine.host_seconds(call.full),
                synchronizations=count,
                synchronization=message,
            )

    def _run_times(self) -> Iterator[records.TimeRecord]:
        tensors = self._make_tensors()
        calls = self._usable_calls(tensors)
        peaks = {}
        for call in calls:
            tensors.restore()
            peaks[call.name] = self._machine.extra_peak_bytes(call.full)
        for direction in self._plan.directions if calls else ():
            moved_bytes = self._operation.fewest_bytes(self._shape, self._dtype.itemsize, direction)
            floors = self._floors(direction, moved_bytes, tensors.inputs)
            candidates = [
                accuracy.TimedCall(name=name, prepare=tensors.restore, run=run) for name, run in floors.items()
            ]
            candidates += [call.candidate(direction) for call in calls]
            times = accuracy.time_in_turns(candidates, self._machine.clock, self._plan.repetitions)
            for call in calls:
                own = times[call.name]
                yield records.TimeRecord(
                    subject=self._subject(call.name),
                    direction=direction,
                    median_seconds=own.median,
                    low_seconds=own.low,
                    high_seconds=own.high,
                    repetitions=own.count,
                    extra_peak_bytes=peaks[call.name],
                    **_compare_to_floor(own.median, times, moved_bytes),
                )

    def _floors(self, direction: records.Direction, moved_bytes: int | None, inputs: Tensors) -> dict[str, Run]:
        """The lower bound to time in turns with the kernels, and a copy large enough to measure bandwidth."""
        if self._operation.name == "flce" and direction is records.Direction.FULL:
            return {_FLOOR: three_products(inputs["hidden"], inputs["weight"])}
        if moved_bytes is None:
            return {}
        return {_FLOOR: self._machine.copy(moved_bytes), _LARGE_COPY: self._machine.copy(_LARGE_COPY_BYTES)}

    def _run_errors(self) -> Iterator[records.ErrorRecord | records.MissingRecord]:
        eager = next((provided for provided in self._found if provided.name == accuracy.EAGER), None)
        if eager is None:
            (eager,), _ = find_provided(self._operation.name, (accuracy.EAGER,), self._machine.device.type)
        yield from accuracy.measure_errors(self._operation, self._shape, self._found, eager, self._maker())

    def _usable_calls(self, tensors: accuracy.CallTensors) -> list[accuracy.BoundCall]:
        """Providers whose first few calls succeed; the others are recorded as missing."""
        usable = []
        for provided in self._found:
            call = accuracy.BoundCall(self._operation, provided, tensors)
            reason = self._failure(call, tensors)
            if reason is None:
                usable.append((provided, call))
            else:
                self._missing.append((provided.name, reason))
        self._found = [provided for provided, _ in usable]
        return [call for _, call in usable]

    def _failure(self, call: accuracy.BoundCall, tensors: accuracy.CallTensors) -> str | None:
        """Warm a kernel up; if that fails in any way, the reason in one line, and the other kernels still run."""
        try:
            for _ in range(_WARM_UP_CALLS):
                tensors.restore()
                call.full()
        except Exception as error:
            reason = accuracy.describe_failure(error)
        else:
            return None
        # outside of the handler, whose traceback holds the tensors of the call
        self._machine.release()
        return reason

    def _make_tensors(self) -> accuracy.CallTensors:
        return accuracy.make_tensors(self._operation, self._shape, self._maker())

    def _maker(self) -> Maker:
        return Maker(dtype=self._dtype, generator=torch.Generator(self._machine.device).manual_seed(0))

    def _subject(self, provider: str) -> records.Subject:
        return self._operation.subject(provider, self._shape, self._plan.dtype)


def _compare_to_floor(
    seconds: float, times: Mapping[str, accuracy.Quantiles], moved_bytes: int | None
) -> dict[str, Any]:
    """The fields of a time record that refer to the floor."""
    if _FLOOR not in times:
        return {}
    floor_seconds = times[_FLOOR].median
    found: dict[str, Any] = {"floor_seconds": floor_seconds, "floor_share": floor_seconds / seconds}
    if moved_bytes is None:
        return {"floor": "products", **found}
    rate_share = moved_bytes / _LARGE_COPY_BYTES * times[_LARGE_COPY].median / seconds
    return {"floor": "copy", "copy_rate_share": rate_share, **found}


def three_products(hidden: Tensor, weight: Tensor) -> Callable[[], None]:
    """The matrix products that every fused loss needs: logits, and the gradients of both factors."""
    hidden, weight = hidden.detach(), weight.detach()
    logits = torch.empty(hidden.shape[0], weight.shape[0], dtype=hidden.dtype, device=hidden.device)
    hidden_gradient, weight_gradient = torch.empty_like(hidden), torch.empty_like(weight)

    def run() -> None:
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(logits, weight, out=hidden_gradient)
        torch.mm(logits.t(), hidden, out=weight_gradient)

    return run
