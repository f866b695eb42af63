"""What batches of every length allocate, from the traces of a few lengths.

Sizes are functions of a batch's counts (counts.py, functions.py). Where several functions give all traced sizes and
disagree about a length, that length is traced. Where the order of allocations changes, or no function fits, the range
is halved; a range of a few lengths is traced whole. Requests of the small pool, up to 1 MiB, may follow other rules:
they count with the largest traced size.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ligerprof.errors import UnsupportedError
from ligerprof.recipe.lengths import BatchShape
from ligerprof.runs.whole_run.counts import Count, total_tokens
from ligerprof.runs.whole_run.functions import Values, possible_sizes
from ligerprof.runs.whole_run.traces import Program, Trace
from ligerprof.torch_memory.allocator.settings import SMALL_REQUEST_BYTES
from ligerprof.torch_memory.attention import mask_padding

_MOST_TRACED = 96
# of a range, where it is traced first; not evenly spread, so that no multiple meets all of them
_TRACED_SHARES = (0, 1, 0.52, 0.23, 0.79)
# ranges of as many lengths are traced one by one
_TRACED_WHOLE = 6
# a range in which functions still disagree is halved
_MOST_TRACED_OF_RANGE = 24

Tracer = Callable[[BatchShape], tuple[Trace, ...]]


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a step at all shapes of a range.

    Attributes:
        sizes: of each different allocation, the sizes at all shapes that are possible.
        chosen: of each allocation in order, which of `sizes` it has.
        shapes: their number.
    """

    operations: tuple[int, ...]
    sizes: tuple[tuple[tuple[int, ...], ...], ...]
    chosen: tuple[int, ...]
    bounded_bytes: int
    shapes: int

    @property
    def is_known(self) -> bool:
        """Whether each allocation has possible sizes."""
        return all(self.sizes)

    def program(self) -> Program:
        """The traces at all shapes."""
        return Program(
            operations=np.array(self.operations, np.int32),
            rows=np.array(self.chosen, np.int64),
            # a part without allocations has no rows
            sizes=np.array([possible[0] for possible in self.sizes], np.int64).reshape(len(self.sizes), self.shapes),
        )


class Programs:
    """The traces of all shapes of a run.

    Args:
        tracer: traces the parts of a step on micro-batches of a shape.
        shapes: every shape that will be asked for.
        counts: what sizes may depend on, besides the tokens.

    Attributes:
        traced: the shapes that were traced.
        bounded_bytes: the largest request that counts with an upper bound; 0 without.

    Raises:
        UnsupportedError: the sizes follow no function that is known, on too many lengths to trace each.
    """

    def __init__(self, tracer: Tracer, shapes: Sequence[BatchShape], counts: Sequence[Count]) -> None:
        self._tracer = tracer
        self._counts = counts
        self.traced: dict[BatchShape, tuple[Trace, ...]] = {}
        self.bounded_bytes = 0
        # for each part, its program and the column of the shape
        self._known: dict[BatchShape, tuple[tuple[Program, int], ...]] = {}
        groups: dict[tuple[int, bool, bool], list[BatchShape]] = {}
        for shape in sorted(set(shapes)):
            # attention copies a mask whose rows need padding
            is_padded = shape.masked and mask_padding(shape.tokens) > 0
            groups.setdefault((shape.rows, shape.masked, is_padded), []).append(shape)
        for group in groups.values():
            self._cover(group)

    def program(self, shape: BatchShape, part: int) -> tuple[Program, int]:
        """The program of a part of a step, and the column of the shape."""
        return self._known[shape][part]

    def _cover(self, shapes: Sequence[BatchShape]) -> None:
        """Know the traces of all these shapes, in order of their tokens."""
        if len(shapes) <= _TRACED_WHOLE:
            for shape in shapes:
                self._known[shape] = tuple((trace.program, 0) for trace in self._trace(shape))
            return
        stretches = self._stretches(shapes)
        if len(stretches) > 1:
            for stretch in stretches:
                self._cover(stretch)
        elif not self._fits(shapes):
            middle = (len(shapes) + 1) // 2
            self._cover(shapes[:middle])
            self._cover(shapes[middle:])

    def _stretches(self, shapes: Sequence[BatchShape]) -> list[Sequence[BatchShape]]:
        """Split where the order of allocations changes: where a count begins or ends, else found by bisection."""
        order, last = self._order(shapes[0]), self._order(shapes[-1])
        if order == last:
            return [shapes]
        low, high = 0, len(shapes) - 1
        for turn in self._turns(shapes):
            if self._order(shapes[turn - 1]) == order != self._order(shapes[turn]):
                low, high = turn - 1, turn
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._order(shapes[middle]) == order else (low, middle)
        return [shapes[:high], *self._stretches(shapes[high:])]

    def _turns(self, shapes: Sequence[BatchShape]) -> list[int]:
        """The first shapes at which a count is 0 that was not, or the other way around."""
        kinds = [tuple(count(shape) == 0 for count in self._counts) for shape in shapes]
        return [index for index in range(1, len(kinds)) if kinds[index] != kinds[index - 1]]

    def _order(self, shape: BatchShape) -> tuple[tuple[int, ...], ...]:
        return tuple(trace.operations for trace in self._trace(shape))

    def _fits(self, shapes: Sequence[BatchShape]) -> bool:
        """Know all shapes by functions through some of them; False where the traced ones have none."""
        last = len(shapes) - 1
        places = {round(last * share) for share in _TRACED_SHARES}
        places.update(index for index, shape in enumerate(shapes) if shape in self.traced)
        tokens = [total_tokens(shape) for shape in shapes]
        counted = list(dict.fromkeys(tuple(count(shape) for shape in shapes) for count in self._counts))
        while len(places) <= _MOST_TRACED_OF_RANGE:
            if len({self._order(shapes[place]) for place in places}) > 1:
                return False
            traces = {place: self._trace(shapes[place]) for place in sorted(places)}
            parts = [
                _part({place: parts[index] for place, parts in traces.items()}, tokens, counted)
                for index in range(len(traces[0]))
            ]
            if not all(part.is_known for part in parts):
                return False
            doubted = _most_doubted(parts)
            if doubted is None:
                self.bounded_bytes = max(self.bounded_bytes, *(part.bounded_bytes for part in parts))
                programs = [part.program() for part in parts]
                for column, shape in enumerate(shapes):
                    self._known[shape] = tuple((program, column) for program in programs)
                return True
            places.add(doubted)
        return False

    def _trace(self, shape: BatchShape) -> tuple[Trace, ...]:
        if shape not in self.traced:
            if len(self.traced) == _MOST_TRACED:
                raise UnsupportedError(
                    f"--lengths: what a step allocates follows no simple function of the length near {shape.tokens}"
                    " tokens. Use fewer lengths with --pad-to-multiple-of 64."
                )
            self.traced[shape] = self._tracer(shape)
        return self.traced[shape]


def _part(traces: Mapping[int, Trace], tokens: Values, counted: Sequence[Values]) -> _Part:
    """What is possible at all shapes, from traces of one order at some."""
    rows = list(zip(*(trace.sizes for trace in traces.values()), strict=True))
    numbers = {sizes: number for number, sizes in enumerate(dict.fromkeys(rows))}
    possible, bounded_bytes = [], 0
    for sizes in numbers:
        found = possible_sizes(dict(zip(traces, sizes, strict=True)), tokens, counted)
        if not found and max(sizes) <= SMALL_REQUEST_BYTES:
            found = ((max(sizes),) * len(tokens),)
            bounded_bytes = max(bounded_bytes, *sizes)
        possible.append(found)
    return _Part(
        operations=next(iter(traces.values())).operations,
        sizes=tuple(possible),
        chosen=tuple(numbers[sizes] for sizes in rows),
        bounded_bytes=bounded_bytes,
        shapes=len(tokens),
    )


def _most_doubted(parts: Sequence[_Part]) -> int | None:
    """The shape at which most allocations have several possible sizes; None if none has."""
    doubts: Counter[int] = Counter()
    for part in parts:
        for possible in part.sizes:
            if len(possible) > 1:
                doubts.update(place for place, sizes in enumerate(zip(*possible, strict=True)) if len(set(sizes)) > 1)
    return doubts.most_common(1)[0][0] if doubts else None
