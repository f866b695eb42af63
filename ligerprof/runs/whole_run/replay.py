"""The steps of a run on one allocator, each from the state that the step before left, and the peaks of the run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ligerprof.recipe.lengths import BatchShape, RunShapes
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.outcome import Progress
from ligerprof.runs.whole_run.programs import Program, Programs
from ligerprof.serialization import select
from ligerprof.torch_memory.allocator.caching import AllocatorFullError
from ligerprof.torch_memory.allocator.settings import parse_allocator_settings
from ligerprof.torch_memory.allocator.states import UNIT_BYTES, Sizes, can_compile, make_allocator

_SIZES = ("requested_bytes", "allocated_bytes", "reserved_bytes", "limit_bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunMoment:
    """A step of the run and the longest of its micro-batches."""

    step: int
    shape: BatchShape

    def to_json(self) -> dict[str, Any]:
        return select(self, "step", "shape.rows", "shape.tokens", "shape.masked")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFailure:
    """The allocation that did not fit."""

    moment: RunMoment
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    limit_bytes: int

    def to_json(self) -> dict[str, Any]:
        return {**self.moment.to_json(), **select(self, *_SIZES)}


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeRun:
    """Peaks over all steps of one pass over the data; of the steps that ran, if memory ran out.

    Attributes:
        traced_shapes: those whose steps were simulated; the others follow from them.
        peak_bytes, peak: the most allocated bytes, and when.
        reserved_bytes, reserved: the most reserved bytes, and when they were first reached.
        first_step_peak_bytes: the most allocated bytes of the first step.
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


_REPORTED_STEPS = 2000
# the micro-batches of a step
_Step = tuple[BatchShape, ...]


class Replay:
    """The steps of a run on one allocator."""

    def __init__(self, recipe: TrainingRecipe, shapes: RunShapes, programs: Programs, progress: Progress) -> None:
        self._shapes, self._programs, self._progress = shapes, programs, progress
        gpu = recipe.gpu_spec
        limits = (bound for bound in (recipe.memory_limit_bytes, gpu.usable_bytes) if bound is not None)
        self._allocator = make_allocator(parse_allocator_settings(recipe.alloc_conf), min(limits))
        # of each program, the units of each shape's allocations, one row per shape
        self._units: dict[Program, Sizes] = {}
        # the most units, allocated and reserved, of steps that return to the allocator's present state
        self._known: dict[_Step, tuple[int, int]] = {}
        self._key: object = None
        self._peaks = [(0, 0), (0, 0)]

    def run(self, start: Sequence[tuple[Program, int]]) -> WholeRun:
        """Run the build and the first step, from programs and columns of shapes, and then all other steps."""
        if not can_compile():
            self._progress(
                "no C compiler ($CC, cc, gcc or clang) makes a library here that can be loaded: the steps run in"
                " Python, which takes minutes"
            )
        done, first, oom = 0, 0, None
        try:
            for program, column in start:
                self._run(program, column)
            first = self._allocator.highest
            self._note(0, (first, self._allocator.highest_reserved))
            self._key = self._allocator.key()
            for done, shapes in enumerate(self._shapes.steps[1:], 1):
                if done % _REPORTED_STEPS == 0:
                    self._progress(f"step {done:,} of {len(self._shapes.steps):,}")
                self._note(done, self._known.get(shapes) or self._step(shapes))
            done = len(self._shapes.steps)
        except AllocatorFullError as error:
            self._note(done, (self._allocator.highest, self._allocator.highest_reserved))
            oom = RunFailure(moment=self._moment(done), **select(error, *_SIZES))
        return self._outcome(done, first, oom)

    def _step(self, shapes: _Step) -> tuple[int, int]:
        """Run a step, and return the most units that were allocated and reserved."""
        allocator = self._allocator
        allocator.highest, allocator.highest_reserved = allocator.allocated, allocator.reserved
        for position, shape in enumerate(shapes):
            self._run(*self._programs.program(shape, min(position, 1)))
        self._run(*self._programs.program(shapes[-1], -1))
        highest, key = (allocator.highest, allocator.highest_reserved), allocator.key()
        if key == self._key:
            self._known[shapes] = highest
        else:
            self._known.clear()
            self._key = key
        return highest

    def _run(self, program: Program, column: int) -> None:
        if program not in self._units:
            self._units[program] = np.ascontiguousarray(self._allocator.units_of(program.sizes).T)
        self._allocator.run(program.operations, self._units[program][column][program.rows], (program, column))

    def _note(self, step: int, highest: tuple[int, int]) -> None:
        """Keep the step if it holds more than any before."""
        for index, units in enumerate(highest):
            if units > self._peaks[index][0]:
                self._peaks[index] = (units, step)

    def _moment(self, step: int) -> RunMoment:
        shapes = self._shapes.steps[min(step, len(self._shapes.steps) - 1)]
        return RunMoment(step=step + 1, shape=max(shapes, key=lambda shape: shape.rows * shape.tokens))

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
