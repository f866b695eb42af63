"""Many steps at once, all from one state of the allocator, which they leave as they found it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ligerprof.recipe.lengths import BatchShape
from ligerprof.runs.whole_run.programs import Programs
from ligerprof.runs.whole_run.traces import Numbers, Program
from ligerprof.torch_memory.allocator.lanes import Events, Lanes, prepare
from ligerprof.torch_memory.allocator.states import SMALL_UNITS, AllocatorState

# the micro-batches of a step
Step = tuple[BatchShape, ...]
# the table of blocks of one wave has as many numbers at most
_MOST_NUMBERS = 2**23
_MOST_STEPS = 2048


@dataclass(frozen=True, slots=True)
class _Kind:
    """Programs that differ in sizes only: what they do, and which pool serves each allocation."""

    operations: tuple[int, ...]
    small: tuple[bool, ...]


class Waves:
    """Runs steps side by side.

    Args:
        programs: of all shapes.
        state: any state, whose rules round sizes.
    """

    def __init__(self, programs: Programs, state: AllocatorState) -> None:
        self._programs, self._rules = programs, state
        self._units: dict[int, Numbers] = {}
        self._kinds: dict[tuple[int, bytes], _Kind] = {}
        self._kind_numbers: dict[tuple[BatchShape, int], tuple[int, bytes]] = {}
        # equal operations of several programs
        self._operations: dict[tuple[int, ...], int] = {}
        self._events: dict[tuple[int, bytes, int, tuple[bool, ...]], Events | None] = {}

    def most_steps(self, step: Step) -> int:
        """How many steps like this one can run side by side."""
        allocations = max(len(self._programs.program(step[0], part)[0].rows) for part in (0, -1))
        return min(_MOST_STEPS, _MOST_NUMBERS // max(allocations, 1))

    def run(self, state: AllocatorState, held: int, steps: Sequence[Step]) -> list[int]:
        """Run steps of as many micro-batches from a state each.

        Args:
            state: is not changed.
            held: the number of blocks that are held in it.

        Returns:
            for each step the most units that were allocated, up to the first that needs another segment; none if steps
            leave another state than they find.
        """
        lanes = Lanes(state, len(steps))
        for position in range(len(steps[0]) + 1):
            part = -1 if position == len(steps[0]) else min(position, 1)
            # the steps that lanes still run are the first ones
            shapes = [step[min(position, len(step) - 1)] for step in steps[: lanes.count]]
            after = self._part(lanes, held, shapes, part)
            if after is None or after.count == 0:
                return []
            lanes = after
        return [] if lanes.held else lanes.highest.tolist()

    def _part(self, lanes: Lanes, held: int, shapes: Sequence[BatchShape], part: int) -> Lanes | None:
        """Run a part of steps on one shape per lane; None if lanes hold other blocks than each other."""
        groups: dict[tuple[int, bytes], list[int]] = {}
        for lane, shape in enumerate(shapes):
            groups.setdefault(self._kind(shape, part), []).append(lane)
        count = len(shapes)
        left: dict[tuple[bool, ...], list[tuple[Numbers, Lanes]]] = {}
        for kind, members in groups.items():
            chosen = np.array([lane for lane in members if lane < count], np.int64)
            if len(chosen) == 0:
                continue
            events = self._prepared(kind, held, lanes)
            if events is None:
                return None
            own = lanes.select(chosen) if len(groups) > 1 else lanes
            own.run(events, self._sizes([shapes[lane] for lane in chosen], part))
            if own.count < len(chosen):
                count = int(chosen[own.count])
            if own.count > 0:
                left.setdefault(tuple(block.small for block in own.held), []).append((chosen[: own.count], own))
        if len(left) != 1:
            return None
        if len(groups) > 1:
            lanes.join(next(iter(left.values())))
        return lanes if lanes.count == count else lanes.select(np.arange(count))

    def _prepared(self, kind: tuple[int, bytes], held: int, lanes: Lanes) -> Events | None:
        """What lanes do; None if they free a block that the state holds."""
        small = tuple(block.small for block in lanes.held)
        key = (*kind, held, small)
        if key not in self._events:
            found = self._kinds[kind]
            self._events[key] = None
            if not any(-held <= operation < 0 for operation in found.operations):
                moved = [operation + held if operation < 0 else operation for operation in found.operations]
                self._events[key] = prepare(moved, found.small, small)
        return self._events[key]

    def _kind(self, shape: BatchShape, part: int) -> tuple[int, bytes]:
        if (shape, part) not in self._kind_numbers:
            program, column = self._programs.program(shape, part)
            number = self._operations.setdefault(program.operations, len(self._operations))
            small = self._in_units(program)[program.rows, column] <= SMALL_UNITS
            kind = (number, small.tobytes())
            self._kinds.setdefault(kind, _Kind(program.operations, tuple(small.tolist())))
            self._kind_numbers[shape, part] = kind
        return self._kind_numbers[shape, part]

    def _in_units(self, program: Program) -> Numbers:
        if id(program) not in self._units:
            self._units[id(program)] = self._rules.units_of(program.sizes)
        return self._units[id(program)]

    def _sizes(self, shapes: Sequence[BatchShape], part: int) -> Numbers:
        """Units of each allocation, one column per shape."""
        found = [self._programs.program(shape, part) for shape in shapes]
        sizes = np.empty((len(found[0][0].rows), len(found)), np.int64)
        programs = {id(program): program for program, _ in found}
        for number, program in programs.items():
            lanes = [lane for lane, (other, _) in enumerate(found) if id(other) == number]
            columns = np.array([found[lane][1] for lane in lanes], np.int64)
            sizes[:, lanes] = self._in_units(program)[:, columns][program.rows]
        return sizes
