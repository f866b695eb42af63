"""Polynomials of batch and tokens through traced sizes."""

from collections.abc import Callable

import pytest

from ligerprof.runs.tapes.build import polynomials
from ligerprof.runs.tapes.record import UnlikePassesError
from ligerprof.units import MIB

GRID = [(2, 128), (2, 640), (2, 2048), (8, 128), (8, 640), (8, 2048), (4, 512)]


def test_finds_products_sums_and_halves() -> None:
    functions: list[Callable[[int, int], int]] = [
        lambda b, t: 6 * b * t,
        lambda b, t: b * t * t // 2 + 512 * t,
        lambda _b, _t: 12,
    ]
    sizes = {size: [function(*size) for function in functions] for size in GRID}
    found, numbers, bounded_bytes = polynomials(sizes, len(functions))
    assert [found[number] for number in numbers] == [
        (1, 0, 0, 0, 0, 6, 0),
        (2, 0, 1024, 0, 0, 0, 1),
        (1, 12, *(0,) * 5),
    ]
    assert bounded_bytes == 0


def test_a_small_block_that_is_no_polynomial_counts_with_its_largest_size() -> None:
    sizes = {size: [-(-size[1] // 100) * 512] for size in GRID}
    found, numbers, bounded_bytes = polynomials(sizes, 1)
    assert found[numbers[0]] == (1, bounded_bytes, *(0,) * 5)
    assert bounded_bytes == 21 * 512


@pytest.mark.parametrize("blocks", [0, 1])
def test_a_large_block_and_an_argument_have_to_be_polynomials(blocks: int) -> None:
    sizes = {size: [-(-size[1] // 100) * (MIB if blocks else 1)] for size in GRID}
    with pytest.raises(UnlikePassesError):
        polynomials(sizes, blocks)


def test_one_size_is_a_constant() -> None:
    assert polynomials({(1, 77): [5, 5, 9]}, 3) == ([(1, 5, *(0,) * 5), (1, 9, *(0,) * 5)], [0, 0, 1], 0)


def test_batches_of_one_length_are_lines() -> None:
    assert polynomials({(3, 77): [30], (8, 77): [80], (2, 77): [20]}, 1)[0] == [(1, 0, 0, 0, 10, 0, 0)]
