"""What batches of every length allocate, from the traces of a few lengths.

Sizes are known functions of the number of tokens: polynomials of the tokens, or of the tokens rounded up as kernels
round them. A function is fitted to three traced lengths and must give the sizes of all other traced ones exactly. Where
the order of allocations changes, or no function fits, the range is halved; a range of a few lengths is traced whole.
Requests of the small pool, up to 1 MiB, may follow other rules, such as the splits of a reduction: they count with the
largest traced size.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations

from ligerprof.errors import UnsupportedError
from ligerprof.recipe.lengths import BatchShape
from ligerprof.runs.whole_run.traces import Trace
from ligerprof.torch_memory.allocator.sizes import SMALL_REQUEST_BYTES
from ligerprof.torch_memory.embedding import ROWS_PER_PART

# what kernels round tokens up to: vectors, warps, tiles
_MULTIPLES = tuple(2**power for power in range(15))
_DEGREE = 2
_MOST_TRACED = 96
# ranges of as many lengths are traced one by one
_TRACED_WHOLE = 4

Tracer = Callable[[BatchShape], tuple[Trace, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Function:
    """Bytes by the tokens of a batch: a polynomial of the tokens in whole multiples, plus a share of each token.

    Attributes:
        multiple: tokens that count together; a part of a multiple counts as one, or not if `multiple` is negative.
        coefficients: of the polynomial, lowest power first.
        slope: bytes per token beyond the polynomial.
        bounds: whether it is a constant that no traced size exceeds.
    """

    multiple: int
    coefficients: tuple[Fraction, ...]
    slope: Fraction = Fraction(0)
    bounds: bool = False

    def at(self, tokens: int) -> Fraction:
        rounded = -(-tokens // self.multiple)
        value = Fraction(0)
        for coefficient in reversed(self.coefficients):
            value = value * rounded + coefficient
        return value + self.slope * tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class _Range:
    """Traces of all lengths in a range: the order of one of them, and a function for each allocation.

    Attributes:
        traces: the parts of a step at one length.
        functions: of each part, the distinct functions and which of them gives each allocation's size.
    """

    traces: tuple[Trace, ...]
    functions: tuple[tuple[tuple[_Function, ...], tuple[int, ...]], ...]

    @property
    def bounded_bytes(self) -> int:
        """The largest bound."""
        bounds = (each.coefficients[0] for functions, _ in self.functions for each in functions if each.bounds)
        return int(max(bounds, default=0))

    def at(self, shape: BatchShape) -> tuple[Trace, ...] | None:
        parts = []
        for trace, (functions, chosen) in zip(self.traces, self.functions, strict=True):
            values = [function.at(shape.rows * shape.tokens) for function in functions]
            if any(value.denominator != 1 or value <= 0 for value in values):
                return None
            sizes = [int(value) for value in values]
            parts.append(Trace(operations=trace.operations, sizes=tuple(sizes[index] for index in chosen)))
        return tuple(parts)


class Programs:
    """The traces of all shapes of a run.

    Args:
        tracer: traces the parts of a step on micro-batches of a shape.
        shapes: every shape that will be asked for.

    Attributes:
        traced: the shapes that were traced.
        bounded_bytes: the largest request that counts with an upper bound; 0 without.

    Raises:
        UnsupportedError: the sizes follow no function that is known, on too many lengths to trace each.
    """

    def __init__(self, tracer: Tracer, shapes: Sequence[BatchShape]) -> None:
        self._tracer = tracer
        self.traced: dict[BatchShape, tuple[Trace, ...]] = {}
        self.bounded_bytes = 0
        self._known: dict[BatchShape, tuple[Trace, ...]] = {}
        groups: dict[tuple[int, bool], list[BatchShape]] = {}
        for shape in sorted(set(shapes)):
            groups.setdefault((shape.rows, shape.masked), []).append(shape)
        for group in groups.values():
            self._cover(group)

    def parts(self, shape: BatchShape) -> tuple[Trace, ...]:
        """The parts of a step on micro-batches of a shape."""
        return self._known[shape]

    def _cover(self, shapes: Sequence[BatchShape]) -> None:
        """Know the traces of all these shapes, in order of their tokens."""
        if len(shapes) <= _TRACED_WHOLE:
            for shape in shapes:
                self._known[shape] = self._trace(shape)
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
        """Split where the order of allocations changes, found by bisection between ends that differ."""
        order, last = self._order(shapes[0]), self._order(shapes[-1])
        if order == last:
            return [shapes]
        low, high = 0, len(shapes) - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._order(shapes[middle]) == order else (low, middle)
        return [shapes[:high], *self._stretches(shapes[high:])]

    def _order(self, shape: BatchShape) -> tuple[tuple[int, ...], ...]:
        return tuple(trace.operations for trace in self._trace(shape))

    def _fits(self, shapes: Sequence[BatchShape]) -> bool:
        """Know all shapes by functions through some of them; False where the traced ones have none."""
        last = len(shapes) - 1
        chosen = [shapes[index] for index in (0, last // 2, last, last // 4, 3 * last // 4)]
        chosen += [shape for shape in shapes if shape in self.traced and shape not in chosen]
        fitted = _fit({shape: self._trace(shape) for shape in chosen})
        if fitted is None:
            return False
        found = {shape: fitted.at(shape) for shape in shapes}
        if any(parts is None for parts in found.values()):
            return False
        self.bounded_bytes = max(self.bounded_bytes, fitted.bounded_bytes)
        self._known.update({shape: parts for shape, parts in found.items() if parts is not None})
        return True

    def _trace(self, shape: BatchShape) -> tuple[Trace, ...]:
        if shape not in self.traced:
            if len(self.traced) == _MOST_TRACED:
                raise UnsupportedError(
                    f"--lengths: what a step allocates follows no simple function of the length near {shape.tokens}"
                    " tokens. Use fewer lengths with --pad-to-multiple-of 64."
                )
            self.traced[shape] = self._tracer(shape)
        return self.traced[shape]


def _fit(traces: Mapping[BatchShape, tuple[Trace, ...]]) -> _Range | None:
    """Functions that give the sizes of all traces, which must have one order; None without."""
    first, *others = traces.values()
    tokens = [shape.rows * shape.tokens for shape in traces]
    parts = []
    for index, trace in enumerate(first):
        same = [other[index] for other in others]
        if any(other.operations != trace.operations for other in same):
            return None
        rows = list(zip(trace.sizes, *(other.sizes for other in same), strict=True))
        numbers = {sizes: number for number, sizes in enumerate(dict.fromkeys(rows))}
        functions = [_function(tokens, sizes) for sizes in numbers]
        found = tuple(function for function in functions if function is not None)
        if len(found) < len(functions):
            return None
        parts.append((found, tuple(numbers[sizes] for sizes in rows)))
    return _Range(traces=first, functions=tuple(parts))


def _function(tokens: Sequence[int], sizes: Sequence[int]) -> _Function | None:
    for function in _candidates(tokens, sizes):
        if all(function.at(count) == size for count, size in zip(tokens, sizes, strict=True)):
            return function
    if max(sizes) > SMALL_REQUEST_BYTES:
        return None
    return _Function(multiple=1, coefficients=(Fraction(max(sizes)),), bounds=True)


def _candidates(tokens: Sequence[int], sizes: Sequence[int]) -> Iterator[_Function]:
    """Functions through some of the sizes, plain ones first."""
    for multiple in _MULTIPLES:
        rounded = [-(-count // multiple) for count in tokens]
        points = dict(zip(rounded[: _DEGREE + 1], sizes, strict=False))
        yield _Function(multiple=multiple, coefficients=_through(points))
    for multiple in (ROWS_PER_PART, *_MULTIPLES[1:]):
        # a part of a multiple that does not count is a negative one that does, of the tokens counted downwards
        for sign in (1, -1):
            pairs = [(count, -(-sign * count // multiple)) for count in tokens]
            if (solved := _solve(pairs, sizes)) is not None:
                constant, slope, step = solved
                yield _Function(multiple=sign * multiple, coefficients=(constant, step), slope=slope)


def _solve(points: Sequence[tuple[int, int]], sizes: Sequence[int]) -> tuple[Fraction, Fraction, Fraction] | None:
    """Constant and factors of both numbers, from three of the points that are not on one line; None without."""
    (x, y), size = points[0], sizes[0]
    for (second, size_2), (third, size_3) in combinations(list(zip(points[1:], sizes[1:], strict=True)), 2):
        (a, b), (c, d) = ((point[0] - x, point[1] - y) for point in (second, third))
        if (determinant := a * d - b * c) != 0:
            slope = Fraction((size_2 - size) * d - (size_3 - size) * b, determinant)
            step = Fraction((size_3 - size) * a - (size_2 - size) * c, determinant)
            return size - slope * x - step * y, slope, step
    return None


def _through(points: Mapping[int, int]) -> tuple[Fraction, ...]:
    """The coefficients of the polynomial through these points, lowest power first (Newton's form, expanded)."""
    places = list(points)
    differences = [Fraction(value) for value in points.values()]
    for order in range(1, len(places)):
        for index in range(len(places) - 1, order - 1, -1):
            gap = places[index] - places[index - order]
            differences[index] = (differences[index] - differences[index - 1]) / gap
    coefficients = [differences[-1]]
    for index in range(len(places) - 2, -1, -1):
        shifted = [Fraction(0), *coefficients]
        for power, coefficient in enumerate(coefficients):
            shifted[power] -= coefficient * places[index]
        shifted[0] += differences[index]
        coefficients = shifted
    while len(coefficients) > 1 and coefficients[-1] == 0:
        coefficients.pop()
    return tuple(coefficients)
