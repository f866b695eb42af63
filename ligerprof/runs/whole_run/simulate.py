"""Run every step of a pass over the data through one allocator: the peaks of the whole run, fragmentation included."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ligerprof.errors import UnsupportedError
from ligerprof.recipe.categories import Engine
from ligerprof.recipe.conflicts import require_positions
from ligerprof.recipe.lengths import BatchShape, RunShapes, run_shapes
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.outcome import Progress
from ligerprof.runs.simulated.tracing import StepTracer, step_tracer
from ligerprof.runs.whole_run.counts import known_counts
from ligerprof.runs.whole_run.programs import Programs
from ligerprof.runs.whole_run.traces import Ledger, Trace
from ligerprof.serialization import select, to_json
from ligerprof.torch_memory.allocator.caching import AllocatorFullError
from ligerprof.torch_memory.allocator.settings import parse_allocator_settings
from ligerprof.torch_memory.allocator.states import UNIT_BYTES, AllocatorState, Block

# states that are kept to go on from; a run seldom comes back to more
_MOST_STATES = 256
_REPORTED_STEPS = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class RunMoment:
    """A step of the run and the longest of its micro-batches."""

    step: int
    shape: BatchShape

    def to_json(self) -> dict[str, Any]:
        """The object of a moment in JSON."""
        return {"step": self.step, **to_json(select(self.shape, "rows", "tokens", "masked"))}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFailure:
    """The allocation that did not fit."""

    moment: RunMoment
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    limit_bytes: int

    def to_json(self) -> dict[str, Any]:
        """The object of `oom` in JSON."""
        return {
            **self.moment.to_json(),
            **select(self, "requested_bytes", "allocated_bytes", "reserved_bytes", "limit_bytes"),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeRun:
    """Peaks over all steps of one pass over the data; of the steps that ran, if memory ran out.

    Attributes:
        shapes: the micro-batches.
        steps: steps that ran to their end.
        distinct_shapes: different shapes among the micro-batches.
        traced_shapes: those whose steps were simulated; the others follow from them.
        peak_bytes, peak: the most allocated bytes, and when.
        reserved_bytes, reserved: the most reserved bytes, and when they were first reached.
        first_step_peak_bytes: the most allocated bytes of the first step.
        oom: the allocation that did not fit the limit, or None.
        bounded_bytes: the largest temporary that counts with an upper bound; 0 without.
    """

    shapes: RunShapes
    steps: int
    distinct_shapes: int
    traced_shapes: int
    peak_bytes: int
    peak: RunMoment
    reserved_bytes: int
    reserved: RunMoment
    first_step_peak_bytes: int
    oom: RunFailure | None
    bounded_bytes: int

    @property
    def fragmentation_bytes(self) -> int:
        """Bytes that the allocator reserved beyond the most that was ever allocated."""
        return self.reserved_bytes - self.peak_bytes

    @property
    def padding_share(self) -> float:
        """Share of the micro-batches' tokens that are padding."""
        return 1 - self.shapes.tokens / self.shapes.batch_tokens

    def to_json(self) -> dict[str, Any]:
        """The value of `whole_run` in JSON."""
        return {
            **select(self, "steps", "shapes.sequences", "shapes.cut", "distinct_shapes", "traced_shapes"),
            **select(self, "padding_share", "peak_bytes", "peak", "reserved_bytes", "reserved"),
            **select(self, "fragmentation_bytes", "first_step_peak_bytes", "oom", "bounded_bytes"),
        }


def simulate_run(recipe: TrainingRecipe, progress: Progress) -> WholeRun:
    """Simulate one pass over the recipe's file of lengths, under its memory limit.

    A micro-batch's tensors are there from the start of its forward pass to the end of its backward pass.

    Raises:
        LigerprofError: what `simulate_step` and `run_shapes` raise.
        UnsupportedError: sizes that follow no known function of the length, or allocator settings that are not covered.
    """
    if recipe.engine is not Engine.TORCH:
        raise UnsupportedError(f"--lengths: a whole run under {recipe.engine} cannot be simulated. Use --engine torch.")
    if recipe.activation_offload:
        raise UnsupportedError("--lengths: a whole run with --activation-offload cannot be simulated. Take one out.")
    shapes = run_shapes(recipe)
    require_positions(recipe)
    progress(f"tracing steps of {recipe.spec.name} for {len(shapes.steps):,} steps of the run")
    with step_tracer(recipe) as tracer:
        parts = _Parts(tracer, progress, accumulates=recipe.grad_accum > 1)
        start = parts.start(shapes.steps[0])
        # a step after the first one is needed before steps are alike
        parts.steady(shapes.steps[0][0])
        wanted = [shape for step in shapes.steps[1:] for shape in step]
        programs = Programs(parts.steady, wanted, known_counts(recipe, shapes.longest))
    return _Replay(recipe, shapes, programs, progress).run(start)


class _Parts:
    """Traces parts of steps in the order of training."""

    def __init__(self, tracer: StepTracer, progress: Progress, *, accumulates: bool) -> None:
        self._tracer, self._progress = tracer, progress
        self._acts = (tracer.micro_batch,) * (1 + accumulates)
        self._ledger = Ledger()
        self._seen: dict[int, int] = {}

    def start(self, shapes: Sequence[BatchShape]) -> list[Trace]:
        """The build and the first step."""
        traces = [self._take()]
        for shape in shapes:
            self._tracer.micro_batch(shape)
            traces.append(self._take())
        self._tracer.update()
        return [*traces, self._take()]

    def steady(self, shape: BatchShape) -> tuple[Trace, ...]:
        """A step on micro-batches of a shape: the first, which makes gradients, perhaps a later one, and the update."""
        self._progress(f"tracing {shape.rows} x {shape.tokens} tokens")
        found: list[Trace] = []
        for act in self._acts:
            self._expect(len(found))
            act(shape)
            found.append(self._take())
        self._expect(len(found))
        self._tracer.update()
        return (*found, self._take())

    def _expect(self, part: int) -> None:
        """Traces refer to held blocks by number, so that as many must be held before each part."""
        held = self._ledger.count
        if self._seen.setdefault(part, held) != held:
            raise UnsupportedError("--lengths: a step leaves other blocks behind than the one before.")

    def _take(self) -> Trace:
        return self._ledger.trace(self._tracer.take())


@dataclass(frozen=True, slots=True)
class _After:
    """What a step did from one state of the allocator.

    Attributes:
        state: the number of the state that it ended in.
        highest, highest_reserved: the most units of the step.
    """

    state: int
    highest: int
    highest_reserved: int


class _Replay:
    """The steps of a run on one allocator."""

    def __init__(self, recipe: TrainingRecipe, shapes: RunShapes, programs: Programs, progress: Progress) -> None:
        self._shapes, self._programs, self._progress = shapes, programs, progress
        gpu = recipe.gpu_spec
        limits = (bound for bound in (recipe.memory_limit_bytes, gpu.usable_bytes) if bound is not None)
        self._state = AllocatorState(parse_allocator_settings(recipe.alloc_conf), min(limits))
        self._held: list[Block] = []
        self._sizes: dict[tuple[BatchShape, int], list[int]] = {}
        # states that were reached, and what steps did from them
        self._numbers: dict[tuple[object, ...], int] = {}
        self._kept: dict[int, tuple[AllocatorState, list[Block]]] = {}
        self._known: dict[tuple[int, tuple[BatchShape, ...]], _After] = {}
        self._peaks = [(0, 0), (0, 0)]

    def run(self, start: Sequence[Trace]) -> WholeRun:
        """Run the first step from its traces and all others from programs."""
        done, first, oom = 0, 0, None
        try:
            for trace in start:
                self._run(trace.operations, [self._state.units(size) for size in trace.sizes])
            first = self._note(0, self._state.highest, self._state.highest_reserved)
            done, number = 1, self._number()
            for index, shapes in enumerate(self._shapes.steps[1:], 1):
                number = self._step(index, number, shapes)
                done += 1
                if done % _REPORTED_STEPS == 0:
                    self._progress(f"step {done:,} of {len(self._shapes.steps):,}")
        except AllocatorFullError as error:
            self._note(done, self._state.highest, self._state.highest_reserved)
            oom = self._failure(done, error)
        return self._outcome(done, first, oom)

    def _step(self, index: int, number: int, shapes: tuple[BatchShape, ...]) -> int:
        """Run a step from a state, and return the number of the state that it ends in."""
        after = self._known.get((number, shapes))
        if after is None or (after.state != number and after.state not in self._kept):
            self._restore(number)
            self._state.highest = self._state.allocated
            self._state.highest_reserved = self._state.reserved
            for position, shape in enumerate(shapes):
                self._part(shape, min(position, 1))
            self._part(shapes[-1], -1)
            after = _After(self._number(), self._state.highest, self._state.highest_reserved)
            self._known[number, shapes] = after
            self._current = after.state
        self._note(index, after.highest, after.highest_reserved)
        return after.state

    def _part(self, shape: BatchShape, part: int) -> None:
        trace = self._programs.parts(shape)[part]
        sizes = self._sizes.get((shape, part))
        if sizes is None:
            sizes = self._sizes[shape, part] = [self._state.units(size) for size in trace.sizes]
        self._run(trace.operations, sizes)

    def _run(self, operations: Sequence[int], sizes: Sequence[int]) -> None:
        self._held = self._state.run(operations, sizes, self._held)

    def _number(self) -> int:
        """The number of the present state; the state is kept to go on from."""
        key = (self._state.key, tuple(self._held))
        number = self._numbers.setdefault(key, len(self._numbers))
        self._current = number
        if number not in self._kept:
            if len(self._kept) == _MOST_STATES:
                del self._kept[next(iter(self._kept))]
            self._kept[number] = (self._state.copy(), self._held)
        return number

    def _restore(self, number: int) -> None:
        if number != self._current:
            state, self._held = self._kept[number]
            self._state = state.copy()
            self._current = number

    def _note(self, step: int, highest: int, reserved: int) -> int:
        """Keep the step if it holds more than any before."""
        for index, units in enumerate((highest, reserved)):
            if units > self._peaks[index][0]:
                self._peaks[index] = (units, step)
        return highest

    def _moment(self, step: int) -> RunMoment:
        shapes = self._shapes.steps[min(step, len(self._shapes.steps) - 1)]
        return RunMoment(step=step + 1, shape=max(shapes, key=lambda shape: shape.rows * shape.tokens))

    def _failure(self, step: int, error: AllocatorFullError) -> RunFailure:
        return RunFailure(
            moment=self._moment(step),
            requested_bytes=error.requested_bytes,
            allocated_bytes=error.allocated_bytes,
            reserved_bytes=error.reserved_bytes,
            limit_bytes=error.limit_bytes,
        )

    def _outcome(self, steps: int, first: int, oom: RunFailure | None) -> WholeRun:
        (peak, peak_step), (reserved, reserved_step) = self._peaks
        return WholeRun(
            shapes=self._shapes,
            steps=steps,
            distinct_shapes=len({shape for step in self._shapes.steps for shape in step}),
            traced_shapes=len(self._programs.traced),
            peak_bytes=peak * UNIT_BYTES,
            peak=self._moment(peak_step),
            reserved_bytes=reserved * UNIT_BYTES,
            reserved=self._moment(reserved_step),
            first_step_peak_bytes=first * UNIT_BYTES,
            oom=oom,
            bounded_bytes=self._programs.bounded_bytes,
        )
