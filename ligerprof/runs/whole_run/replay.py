"""The steps of a run on one allocator, each from the state that the step before left."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from ligerprof.recipe.lengths import BatchShape, RunShapes
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.outcome import Progress
from ligerprof.runs.whole_run.outcome import RunFailure, RunMoment, WholeRun
from ligerprof.runs.whole_run.programs import Programs
from ligerprof.runs.whole_run.traces import Trace
from ligerprof.runs.whole_run.waves import Step, Waves
from ligerprof.torch_memory.allocator.caching import AllocatorFullError
from ligerprof.torch_memory.allocator.lanes import Lanes
from ligerprof.torch_memory.allocator.settings import parse_allocator_settings
from ligerprof.torch_memory.allocator.states import UNIT_BYTES, AllocatorState, Block

# states that are kept to go on from; a run seldom comes back to more
_MOST_STATES = 256
_REPORTED_STEPS = 2000
# steps that return to their state before others are run side by side, and how many of them at first
_CALM_STEPS = 4
_FIRST_WAVE = 32


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


class Replay:
    """The steps of a run on one allocator."""

    def __init__(self, recipe: TrainingRecipe, shapes: RunShapes, programs: Programs, progress: Progress) -> None:
        self._shapes, self._programs, self._progress = shapes, programs, progress
        gpu = recipe.gpu_spec
        limits = (bound for bound in (recipe.memory_limit_bytes, gpu.usable_bytes) if bound is not None)
        self._state = AllocatorState(parse_allocator_settings(recipe.alloc_conf), min(limits))
        self._held: list[Block] = []
        self._waves = Waves(programs, self._state)
        # steps in a row that returned to the state they began in
        self._calm = 0
        self._wave = _FIRST_WAVE
        # states that were reached, and what steps did from them
        self._numbers: dict[tuple[object, ...], int] = {}
        self._kept: dict[int, tuple[AllocatorState, list[Block]]] = {}
        self._known: dict[tuple[int, Step], _After] = {}
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
                if (number, shapes) not in self._known and self._calm >= _CALM_STEPS:
                    self._run_ahead(index, number)
                number = self._step(index, number, shapes)
                done += 1
                if done % _REPORTED_STEPS == 0:
                    self._progress(f"step {done:,} of {len(self._shapes.steps):,}")
        except AllocatorFullError as error:
            self._note(done, self._state.highest, self._state.highest_reserved)
            oom = self._failure(done, error)
        return self._outcome(done, first, oom)

    def _run_ahead(self, index: int, number: int) -> None:
        """Run the steps to come side by side, as far as they leave the state of this number as they find it."""
        self._restore(number)
        if not Lanes.can_start(self._state):
            return
        upcoming, first = self._shapes.steps[index:], self._shapes.steps[index]
        unknown = (step for step in upcoming if len(step) == len(first) and (number, step) not in self._known)
        count = min(self._wave, self._waves.most_steps(first))
        steps = list(islice(dict.fromkeys(unknown), count))
        self._progress(f"step {index + 1:,} of {len(self._shapes.steps):,}: {len(steps):,} steps at once")
        highest = self._waves.run(self._state, len(self._held), steps)
        for step, units in zip(steps, highest, strict=False):
            self._known[number, step] = _After(number, units, self._state.reserved)
        if len(highest) == len(steps):
            self._wave *= 2
        else:
            # the next one changes the state
            self._calm, self._wave = 0, max(_FIRST_WAVE, len(highest))

    def _step(self, index: int, number: int, shapes: Step) -> int:
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
            self._calm = self._calm + 1 if after.state == number else 0
        self._note(index, after.highest, after.highest_reserved)
        return after.state

    def _part(self, shape: BatchShape, part: int) -> None:
        trace = self._programs.parts(shape)[part]
        self._run(trace.operations, [self._state.units(size) for size in trace.sizes])

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
