"""Run the measurements of a benchmark; every provider gets a result or a reason why it has none."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ligerprof.runs.bench.accuracy import EAGER, measure_errors
from ligerprof.runs.bench.calls import BoundCall, CallTensors, describe_failure, make_tensors
from ligerprof.runs.bench.floors import Direction, fewest_bytes
from ligerprof.runs.bench.machine import Machine, Run
from ligerprof.runs.bench.operations import DTYPES, OPERATIONS, Maker, Operation
from ligerprof.runs.bench.providers import find_provided
from ligerprof.runs.bench.records import ErrorRecord, Finding, HostRecord, MissingRecord, Record, Subject, TimeRecord
from ligerprof.runs.bench.shapes import TINY, BenchShape, find_shapes
from ligerprof.runs.bench.timing import Candidate, Quantiles, Repetitions, time_in_turns
from ligerprof.runs.outcome import Progress
from ligerprof.units import GIB

_FLOOR, _LARGE_COPY = "floor", "large copy"
_LARGE_COPY_BYTES = 2 * GIB
_SEED = 0
_WARM_UP_CALLS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchPlan:
    """The measurements to run.

    Attributes:
        providers: `PROVIDER` or `PROVIDER:VARIANT` each; None: all.
        shapes: as `--shapes` takes it.
        dtype: bf16, fp16 or fp32.
        errors, host: whether to measure errors against fp64, and the host's cost of a call.
    """

    kernels: tuple[str, ...]
    providers: tuple[str, ...] | None = None
    shapes: str = "study"
    directions: tuple[Direction, ...] = tuple(Direction)
    dtype: str = "bf16"
    repetitions: Repetitions = field(default_factory=Repetitions)
    errors: bool = True
    host: bool = True


def run_bench(plan: BenchPlan, machine: Machine, progress: Progress) -> Iterator[Finding]:
    """Run the measurements; yields each finding."""
    environment = machine.environment()
    for kernel in plan.kernels:
        for record in _run_kernel(OPERATIONS[kernel], plan, machine, progress):
            yield Finding(record=record, environment=environment)


def _run_kernel(operation: Operation, plan: BenchPlan, machine: Machine, progress: Progress) -> Iterator[Record]:
    for shape in find_shapes(operation.name, plan.shapes):
        progress(f"{operation.name} {shape.name}: {operation.sizes(shape)} {plan.dtype}")
        yield from _Bench(operation, shape, plan, machine).run()
        machine.release()
    if plan.host:
        progress(f"{operation.name}: the host's cost")
        yield from _Bench(operation, TINY, plan, machine).run_host()
        machine.release()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Floor:
    """A lower bound that is timed in turns with the kernels.

    Attributes:
        kind: `products`, `copy`, or empty if there is none.
        large_copy: a copy large enough to measure bandwidth; with `copy` only.
        moved_bytes: the fewest bytes that the operation can move; with `copy` only.
    """

    kind: str = ""
    run: Run | None = None
    large_copy: Run | None = None
    moved_bytes: int = 0

    def candidates(self, prepare: Run) -> Iterator[Candidate]:
        """The candidates to time in turns with the kernels."""
        for name, run in ((_FLOOR, self.run), (_LARGE_COPY, self.large_copy)):
            if run is not None:
                yield Candidate(name=name, prepare=prepare, run=run)

    def figures(self, times: Mapping[str, Quantiles], seconds: float) -> dict[str, Any]:
        """The fields of a time record that refer to the floor."""
        if self.run is None:
            return {}
        floor_seconds = times[_FLOOR].median
        found: dict[str, Any] = {"floor": self.kind, "floor_seconds": floor_seconds}
        found["floor_share"] = floor_seconds / seconds
        if self.large_copy is not None:
            found["copy_rate_share"] = self.moved_bytes / _LARGE_COPY_BYTES * times[_LARGE_COPY].median / seconds
        return found


class _Bench:
    """One kernel at one shape, for every provider, on the same tensors."""

    def __init__(self, operation: Operation, shape: BenchShape, plan: BenchPlan, machine: Machine) -> None:
        self._operation, self._shape, self._plan, self._machine = operation, shape, plan, machine
        self._dtype = DTYPES[plan.dtype]
        self._found, self._missing = find_provided(operation.name, plan.providers, machine.device.type)

    def run(self) -> Iterator[Record]:
        """Times, memory, errors, and missing providers."""
        yield from self._run_times()
        self._machine.release()
        if self._plan.errors:
            yield from self._run_errors()
        yield from (MissingRecord(subject=self._subject(name), reason=reason) for name, reason in self._missing)

    def run_host(self) -> Iterator[HostRecord]:
        """The host's cost of each call; missing providers are reported for the real shapes."""
        for call in self._usable_calls(self._make_tensors()):
            count, message = self._machine.synchronizations(call.full)
            yield HostRecord(
                subject=self._subject(call.name),
                host_seconds=self._machine.host_seconds(call.full),
                synchronizations=count,
                synchronization=message,
            )

    def _run_times(self) -> Iterator[TimeRecord]:
        tensors = self._make_tensors()
        calls = self._usable_calls(tensors)
        peaks = {call.name: self._peak(call, tensors) for call in calls}
        for direction in self._plan.directions if calls else ():
            floor = self._floor(direction, tensors)
            candidates = [*floor.candidates(tensors.restore), *(call.candidate(direction) for call in calls)]
            times = time_in_turns(candidates, self._machine.clock, self._plan.repetitions)
            for call in calls:
                yield TimeRecord(
                    subject=self._subject(call.name),
                    direction=direction,
                    median_seconds=times[call.name].median,
                    low_seconds=times[call.name].low,
                    high_seconds=times[call.name].high,
                    repetitions=times[call.name].count,
                    extra_peak_bytes=peaks[call.name],
                    **floor.figures(times, times[call.name].median),
                )

    def _run_errors(self) -> Iterator[ErrorRecord | MissingRecord]:
        eager = next((provided for provided in self._found if provided.name == EAGER), None)
        if eager is None:
            (eager,), _ = find_provided(self._operation.name, (EAGER,), self._machine.device.type)
        yield from measure_errors(self._operation, self._shape, self._found, eager, self._maker())

    def _usable_calls(self, tensors: CallTensors) -> list[BoundCall]:
        """Providers whose first few calls succeed; the others are recorded as missing."""
        usable = []
        for provided in self._found:
            call = BoundCall(self._operation, provided, tensors)
            reason = self._failure(lambda call=call: self._warm_up(call, tensors))  # type: ignore[misc]
            if reason is None:
                usable.append((provided, call))
            else:
                self._missing.append((provided.name, reason))
        self._found = [provided for provided, _ in usable]
        return [call for _, call in usable]

    def _failure(self, run: Callable[[], None]) -> str | None:
        """Why `run` fails, in one line: third-party kernels may fail in any way, and the others still run."""
        try:
            run()
        except Exception as error:
            reason = describe_failure(error)
        else:
            return None
        # outside of the handler, whose traceback holds the tensors of the call
        self._machine.release()
        return reason

    def _warm_up(self, call: BoundCall, tensors: CallTensors) -> None:
        for _ in range(_WARM_UP_CALLS):
            tensors.restore()
            call.full()

    def _peak(self, call: BoundCall, tensors: CallTensors) -> int:
        tensors.restore()
        return self._machine.extra_peak_bytes(call.full)

    def _floor(self, direction: Direction, tensors: CallTensors) -> "_Floor":
        if self._operation.name == "flce":
            if direction is not Direction.FULL:
                return _Floor()
            return _Floor(kind="products", run=three_products(tensors.inputs["hidden"], tensors.inputs["weight"]))
        moved_bytes = fewest_bytes(self._operation.moved, self._shape, self._dtype.itemsize, direction)
        if moved_bytes is None:
            return _Floor()
        copy, large_copy = (self._machine.copy(count) for count in (moved_bytes, _LARGE_COPY_BYTES))
        return _Floor(kind="copy", run=copy, large_copy=large_copy, moved_bytes=moved_bytes)

    def _make_tensors(self) -> CallTensors:
        return make_tensors(self._operation, self._shape, self._maker())

    def _maker(self) -> Maker:
        return Maker(dtype=self._dtype, generator=torch.Generator(self._machine.device).manual_seed(_SEED))

    def _subject(self, provider: str) -> Subject:
        return Subject(
            kernel=self._operation.name,
            provider=provider,
            shape=self._shape.name,
            sizes=self._operation.sizes(self._shape),
            dtype=self._plan.dtype,
        )


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
