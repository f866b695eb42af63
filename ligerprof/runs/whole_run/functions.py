"""Functions of a batch's counts that give the sizes which were traced.

A size is a polynomial of one count, or a count and a share of each token. Every function of these kinds that gives all
traced sizes is found; what it gives elsewhere is exact only where all of them agree.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from math import lcm

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
        tokens: of each shape.
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
