"""Which measurements are made of which kernel, in which order; every provider ends in a figure or a reason."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ligerprof.runs.bench.accuracy import EAGER, measure_errors
from ligerprof.runs.bench.calls import BoundCall, CallTensors, describe_failure, make_tensors
from ligerprof.runs.bench.floors import Direction, copy_floor_seconds, fewest_bytes
from ligerprof.runs.bench.machine import Machine
from ligerprof.runs.bench.operations import DTYPES, OPERATIONS, Maker, Operation
from ligerprof.runs.bench.providers import find_provided
from ligerprof.runs.bench.records import ErrorRecord, Finding, HostRecord, MissingRecord, Record, Subject, TimeRecord
from ligerprof.runs.bench.shapes import TINY, BenchShape, find_shapes
from ligerprof.runs.bench.timing import Candidate, Quantiles, Repetitions, time_in_turns
from ligerprof.runs.outcome import Progress

_FLOOR = "floor"
_SEED = 0
_WARM_UP_CALLS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchPlan:
    """What is measured.

    Attributes:
        providers: `PROVIDER` or `PROVIDER:VARIANT` each; None is everybody.
        shapes: as `--shapes` takes it.
        dtype: bf16, fp16 or fp32.
        errors, host: whether to measure errors against fp64, and the host's cost.
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
    """Measure, finding by finding."""
    environment = machine.environment()
    for kernel in plan.kernels:
        for record in _run_kernel(OPERATIONS[kernel], plan, machine, progress):
            yield Finding(record=record, environment=environment)


def _run_kernel(operation: Operation, plan: BenchPlan, machine: Machine, progress: Progress) -> Iterator[Record]:
    for shape in find_shapes(operation.name, plan.shapes):
        progress(f"{operation.name} {shape.name}: {shape.sizes(operation.name)} {plan.dtype}")
        yield from _Bench(operation, shape, plan, machine).run()
        machine.release()
    if plan.host:
        progress(f"{operation.name}: the host's cost")
        yield from _Bench(operation, TINY, plan, machine).run_host()
        machine.release()


class _Bench:
    """One kernel at one shape: every provider on the same tensors."""

    def __init__(self, operation: Operation, shape: BenchShape, plan: BenchPlan, machine: Machine) -> None:
        self._operation, self._shape, self._plan, self._machine = operation, shape, plan, machine
        self._dtype = DTYPES[plan.dtype]
        self._found, self._missing = find_provided(operation.name, plan.providers, machine.device.type)

    def run(self) -> Iterator[Record]:
        """Times, memory, errors, and what is missing."""
        yield from self._run_times()
        self._machine.release()
        if self._plan.errors:
            yield from self._run_errors()
        yield from (MissingRecord(subject=self._subject(name), reason=reason) for name, reason in self._missing)

    def run_host(self) -> Iterator[HostRecord]:
        """What each call costs the host; who is missing was said at the real shapes."""
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
        for direction in self._plan.directions:
            floor, scale, kind = self._floor(direction, tensors)
            candidates = [*floor, *(call.candidate(direction) for call in calls)]
            times = time_in_turns(candidates, self._machine.clock, self._plan.repetitions) if calls else {}
            floor_seconds = times[_FLOOR].median * scale if floor and calls else None
            for call in calls:
                yield self._time_record(call, direction, times[call.name], (kind, floor_seconds), peaks[call.name])

    def _time_record(
        self,
        call: BoundCall,
        direction: Direction,
        time: Quantiles,
        floor: tuple[str, float | None],
        peak_bytes: int,
    ) -> TimeRecord:
        kind, floor_seconds = floor
        return TimeRecord(
            subject=self._subject(call.name),
            direction=direction,
            median_seconds=time.median,
            low_seconds=time.low,
            high_seconds=time.high,
            repetitions=time.count,
            floor=kind,
            floor_seconds=floor_seconds,
            floor_share=None if floor_seconds is None else floor_seconds / time.median,
            extra_peak_bytes=peak_bytes,
        )

    def _run_errors(self) -> Iterator[ErrorRecord | MissingRecord]:
        eager = next((provided for provided in self._found if provided.name == EAGER), None)
        if eager is None:
            (eager,), _ = find_provided(self._operation.name, (EAGER,), self._machine.device.type)
        yield from measure_errors(self._operation, self._shape, self._found, eager, self._maker())

    def _usable_calls(self, tensors: CallTensors) -> list[BoundCall]:
        """Providers that get through a first few calls; the others' reasons are kept."""
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
        """Why `run` fails, in one line; strangers' kernels may fail in any way, and the others still count."""
        try:
            run()
        except Exception as error:
            reason = describe_failure(error)
        else:
            return None
        # after the handler: the traceback holds the tensors of the call
        self._machine.release()
        return reason

    def _warm_up(self, call: BoundCall, tensors: CallTensors) -> None:
        for _ in range(_WARM_UP_CALLS):
            tensors.restore()
            call.full()

    def _peak(self, call: BoundCall, tensors: CallTensors) -> int:
        tensors.restore()
        return self._machine.extra_peak_bytes(call.full)

    def _floor(self, direction: Direction, tensors: CallTensors) -> tuple[list[Candidate], float, str]:
        """The candidate that the floor is timed with, what its time is multiplied by, and what it is."""
        if self._operation.name == "flce":
            if direction is not Direction.FULL:
                return [], 1.0, ""
            products = three_products(tensors.inputs["hidden"], tensors.inputs["weight"])
            return [Candidate(name=_FLOOR, prepare=tensors.restore, run=products)], 1.0, "products"
        moved = fewest_bytes(self._operation.name, self._shape, self._dtype.itemsize, direction)
        if moved is None:
            return [], 1.0, ""
        copy, copied_bytes = self._machine.copy()
        scale = copy_floor_seconds(moved, copied_bytes=copied_bytes, copy_seconds=1.0)
        return [Candidate(name=_FLOOR, prepare=tensors.restore, run=copy)], scale, "copy"

    def _make_tensors(self) -> CallTensors:
        return make_tensors(self._operation, self._shape, self._maker())

    def _maker(self) -> Maker:
        return Maker(dtype=self._dtype, generator=torch.Generator(self._machine.device).manual_seed(_SEED))

    def _subject(self, provider: str) -> Subject:
        return Subject(
            kernel=self._operation.name,
            provider=provider,
            shape=self._shape.name,
            sizes=self._shape.sizes(self._operation.name),
            dtype=self._plan.dtype,
        )


def three_products(hidden: Tensor, weight: Tensor) -> Callable[[], None]:
    """The matrix products that no fused loss can do without: logits, and the gradients of both factors."""
    hidden, weight = hidden.detach(), weight.detach()
    logits = torch.empty(hidden.shape[0], weight.shape[0], dtype=hidden.dtype, device=hidden.device)
    hidden_gradient, weight_gradient = torch.empty_like(hidden), torch.empty_like(weight)

    def run() -> None:
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(logits, weight, out=hidden_gradient)
        torch.mm(logits.t(), hidden, out=weight_gradient)

    return run
