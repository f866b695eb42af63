"""What batches of every length allocate, from the traces of a few: sizes as functions of a batch's counts.

A size is a polynomial of one count, or a count and a share of each token. Every function of these kinds that gives all
traced sizes is found; what it gives elsewhere is exact only where all of them agree. Where they disagree about a
length, that length is traced. Where the order of allocations changes, or no function fits, the range is halved; a range
of a few lengths is traced whole. Requests of the small pool, up to 1 MiB, may follow other rules: they count with the
largest traced size.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cache
from itertools import combinations
from math import lcm

import numpy as np

from ligerprof.analyzers.estimate import kernel_calls
from ligerprof.errors import UnsupportedError
from ligerprof.kernels.spec import KernelMemory, KernelShape, KernelSpec
from ligerprof.recipe.lengths import BatchShape, recipe_of
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.torch_memory.allocator.settings import SMALL_REQUEST_BYTES
from ligerprof.torch_memory.allocator.states import Operations, Sizes, place_left
from ligerprof.torch_memory.attention import mask_padding
from ligerprof.torch_memory.dtypes import FP32_BYTES, HALF_BYTES
from ligerprof.torch_memory.reductions import column_sum_scratch
from ligerprof.torch_memory.sorting import ROWS_PER_PART, EmbeddingGradient, embedding_gradient

Count = Callable[[BatchShape], int]

# what kernels round tokens up to: vectors, warps, tiles
_MULTIPLES = tuple(2**power for power in range(1, 11))


def total_tokens(shape: BatchShape) -> int:
    """Tokens of all rows."""
    return shape.rows * shape.tokens


def _rounded(multiple: int) -> Iterator[Count]:
    """Tokens of a row and of all rows in multiples, and the scores of a row whose keys are rounded."""
    yield lambda shape: -(-shape.tokens // multiple)
    yield lambda shape: -(-total_tokens(shape) // multiple)
    yield lambda shape: shape.tokens * -(-shape.tokens // multiple)


def known_counts(recipe: TrainingRecipe, shape: BatchShape) -> tuple[Count, ...]:
    """What sizes may depend on besides the tokens: rounded tokens, and the bytes of operators whose rule is known.

    Args:
        shape: any micro-batch of the run.
    """
    spec = recipe.spec
    embeddings = [(spec.vocab_size, spec.hidden_size)]
    if spec.architecture.layer_inputs is not None:
        rows, width = map(spec.setting, spec.architecture.layer_inputs)
        embeddings.append((rows, spec.layers * width))
    return (
        *_stated_by_kernels(recipe, shape),
        *(count for rows, width in embeddings for count in _of_embedding(rows, width)),
        *_of_sums(recipe),
        lambda shape: total_tokens(shape) // ROWS_PER_PART,
        *(count for multiple in _MULTIPLES for count in _rounded(multiple)),
    )


def _of_embedding(rows: int, width: int) -> Iterator[Count]:
    """The storage that sorts the tokens and sums the rows of equal ones."""

    @cache
    def gradient(tokens: int) -> EmbeddingGradient | None:
        return embedding_gradient(tokens, rows, width)

    def field(name: str) -> Count:
        # 0 for tokens that are not sorted
        return lambda shape: getattr(gradient(total_tokens(shape)), name, 0)

    yield from map(field, ("sort_bytes", "rank_scan_bytes", "segment_bytes", "segment_scan_bytes"))


def _of_sums(recipe: TrainingRecipe) -> Iterator[Count]:
    """Partial results of sums over tokens, as the gradients of norms' weights and of biases are."""

    def partial(columns: int, element_bytes: int) -> Count:
        return lambda shape: max(column_sum_scratch(total_tokens(shape), columns, element_bytes, gpu), default=0)

    gpu, spec = recipe.gpu_spec, recipe.spec
    columns = {spec.hidden_size, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.intermediate_size}
    for width in sorted(columns):
        yield from (partial(width, element_bytes) for element_bytes in (HALF_BYTES, FP32_BYTES))


def _stated_by_kernels(recipe: TrainingRecipe, shape: BatchShape) -> Iterator[Count]:
    """Nothing if the estimate does not cover the model."""
    if recipe.spec.no_estimate_reason is not None:
        return
    for kernel, call in kernel_calls(recipe_of(recipe, shape)):
        # a norm of queries or keys has several vectors per token
        vectors, rest = divmod(call.tokens, total_tokens(shape))
        if rest == 0:
            yield from _stated(kernel, call, vectors)


def _stated(kernel: KernelSpec, call: KernelShape, vectors: int) -> Iterator[Count]:
    @cache
    def memory(shape: BatchShape) -> KernelMemory:
        assert kernel.memory is not None, "kernel_calls returns kernels with a stated memory"
        return kernel.memory(replace(call, tokens=vectors * total_tokens(shape), sequences=shape.rows))

    def stated(name: str) -> Count:
        return lambda shape: getattr(memory(shape), name)

    yield from (stated(field.name) for field in fields(KernelMemory) if field.name.endswith("_bytes"))


# the values of one count, for each shape
Values = Sequence[int]
_HIGHEST_DEGREE = 2


@dataclass(frozen=True, slots=True)
class _Function:
    """A polynomial of one count's values, lowest power first, plus a slope times those of another."""

    values: Values
    coefficients: tuple[Fraction, ...]
    others: Values = ()
    slope: Fraction = Fraction(0)

    def at(self, places: Sequence[int]) -> tuple[int, ...] | None:
        """Bytes at these shapes; None if they are not whole numbers above 0 everywhere."""
        whole = lcm(self.slope.denominator, *(coefficient.denominator for coefficient in self.coefficients))
        coefficients = [int(coefficient * whole) for coefficient in reversed(self.coefficients)]
        slope = int(self.slope * whole)
        sizes = []
        for place in places:
            value, total = self.values[place], 0
            for coefficient in coefficients:
                total = total * value + coefficient
            if slope:
                total += slope * self.others[place]
            size, rest = divmod(total, whole)
            if rest or size <= 0:
                return None
            sizes.append(size)
        return tuple(sizes)


def possible_sizes(traced: Mapping[int, int], tokens: Values, counted: Sequence[Values]) -> tuple[tuple[int, ...], ...]:
    """The sizes at all shapes, by every function that gives the traced ones; those of different functions once.

    Args:
        traced: bytes by the number of the shape.
        counted: what else sizes may depend on.
    """
    places, everywhere = tuple(traced), range(len(tokens))
    expected = tuple(traced.values())
    found: dict[tuple[int, ...], None] = {}
    for function in _candidates(traced, tokens, counted):
        if function.at(places) == expected and (sizes := function.at(everywhere)) is not None:
            found[sizes] = None
    return tuple(found)


def _candidates(traced: Mapping[int, int], tokens: Values, counted: Sequence[Values]) -> Iterator[_Function]:
    """Functions through some of the traced sizes, those with fewer coefficients first."""
    for degree in range(_HIGHEST_DEGREE + 1):
        for values in (tokens, *counted):
            points = {values[place]: size for place, size in traced.items()}
            # as many coefficients as different values would fit anything
            if len(points) > degree + 1:
                some = dict(list(points.items())[: degree + 1])
                yield _Function(values, _through(some))
    for values in counted:
        pairs = [(tokens[place], values[place]) for place in traced]
        constant, slope, step = _solve(pairs, tuple(traced.values()))
        yield _Function(values, (constant, step), tokens, slope)


def _solve(points: Sequence[tuple[int, int]], sizes: Sequence[int]) -> tuple[Fraction, Fraction, Fraction]:
    """Constant and factors of both numbers, from three of the points that are not on one line.

    Where all are on one line, as a kernel's bytes over a range of tokens can be, the second factor is 1.
    """
    (x, y), size = points[0], sizes[0]
    moved = [(a - x, b - y, other - size) for (a, b), other in zip(points[1:], sizes[1:], strict=True)]
    for (a, b, first), (c, d, second) in combinations(moved, 2):
        if (determinant := a * d - b * c) != 0:
            slope = Fraction(first * d - second * b, determinant)
            step = Fraction(second * a - first * c, determinant)
            break
    else:
        a, b, first = moved[0]
        slope, step = Fraction(first - b, a), Fraction(1)
    return size - slope * x - step * y, slope, step


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Allocations and frees in order.

    Attributes:
        operations: as in `RunAllocator.run`.
        sizes: requested bytes of each allocation.
    """

    operations: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def program(self) -> "Program":
        sizes = np.array(self.sizes, np.int64)[:, None]
        return Program(operations=np.array(self.operations, np.int32), rows=np.arange(len(self.sizes)), sizes=sizes)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Program:
    """The traces of several shapes with one order of operations.

    Attributes:
        rows: for each allocation, its row of `sizes`.
        sizes: requested bytes, one column per shape.
    """

    operations: Operations
    rows: Sizes
    sizes: Sizes


class Ledger:
    """The blocks that are held between traces, in the order of `RunAllocator.run`."""

    def __init__(self) -> None:
        self._held: list[int] = []

    @property
    def count(self) -> int:
        return len(self._held)

    def trace(self, events: Sequence[tuple[int, int]]) -> Trace:
        """Turn (address, requested bytes) events, where 0 bytes are a free, into a trace; moves the ledger on."""
        before = {address: -index for index, address in enumerate(self._held, 1)}
        own: dict[int, int] = {}
        sizes: list[int] = []
        operations: list[int] = []
        allocated: list[int] = []
        for address, size in events:
            if size:
                sizes.append(size)
                own[address] = len(sizes)
                allocated.append(address)
                operations.append(0)
            else:
                # an address can be used again, so the youngest block there is the one that ends
                operations.append(own.pop(address) if address in own else before.pop(address))
        left = set(own.values())
        self._held = place_left(
            [address if address in before else None for address in self._held],
            [address if number in left else None for number, address in enumerate(allocated, 1)],
        )
        return Trace(operations=tuple(_in_order(operations)), sizes=tuple(sizes))


def _in_order(operations: Sequence[int]) -> list[int]:
    """Sort frees that follow each other: their order changes nothing, and some have the order of addresses."""
    ordered: list[int] = []
    frees: list[int] = []
    for operation in operations:
        if operation:
            frees.append(operation)
            continue
        ordered += sorted(frees)
        frees.clear()
        ordered.append(0)
    return [*ordered, *sorted(frees)]


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
    """

    operations: tuple[int, ...]
    sizes: tuple[tuple[tuple[int, ...], ...], ...]
    chosen: tuple[int, ...]
    bounded_bytes: int
    shapes: int

    @property
    def is_known(self) -> bool:
        return all(self.sizes)

    def program(self) -> Program:
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
