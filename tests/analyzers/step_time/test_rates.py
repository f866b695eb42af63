"""Interpolated rates against a plain oracle, and what follows from a data sheet."""

import math

import pytest

from ligerprof.analyzers.step_time.rates import SHEETS, Host, Kind, Surface, Work, find_rates, product
from ligerprof.gpus import GPUS


def oracle(points: list[tuple[tuple[float, ...], float]], shape: tuple[float, ...]) -> float:
    """The mean of all logarithms, each with the inverse cube of its distance in logarithms as its weight."""
    total = weights = 0.0
    for place, value in points:
        distance = math.sqrt(sum((math.log2(a) - math.log2(b)) ** 2 for a, b in zip(place, shape, strict=True)))
        if distance == 0:
            return value
        total += math.log(value) / distance**3
        weights += 1 / distance**3
    return math.exp(total / weights)


POINTS = [((2.0**a, 2.0**b), 1.0 + a / 3 + b / 7) for a in range(0, 9, 4) for b in (1, 6)]


@pytest.mark.parametrize("shape", [(1.0, 2.0), (16.0, 64.0), (3.0, 9.0), (100.0, 3.0), (4096.0, 5.0)])
def test_a_surface_is_the_weighted_mean_of_what_was_measured(shape: tuple[float, ...]) -> None:
    assert Surface(POINTS).at(shape) == pytest.approx(oracle(POINTS, shape), rel=1e-9)


def test_a_surface_takes_the_nearest_alone() -> None:
    far = [((2.0**40, 2.0 ** (40 + each)), 1000.0) for each in range(20)]
    near = [((2.0**each, 1.0), 2.0) for each in range(8)]
    assert Surface([*far, *near]).at((3.0, 1.0)) == pytest.approx(2.0)


@pytest.mark.parametrize("gpu", sorted(SHEETS))
def test_every_sheet_is_of_a_gpu_of_the_table(gpu: str) -> None:
    assert gpu in GPUS
    assert find_rates(gpu) is not None


def test_only_the_measured_gpu_is_marked_so() -> None:
    assert [gpu for gpu in SHEETS if (rates := find_rates(gpu)) is not None and rates.measured] == ["h200"]
    assert find_rates("no such gpu") is None


@pytest.mark.parametrize("shape", [(1, 4096, 4096, 4096), (1, 8192, 14336, 4096), (64, 1024, 1024, 128)])
def test_products_run_below_the_peak_rate_and_at_a_third_of_it(shape: tuple[int, int, int, int]) -> None:
    rates = find_rates("h200")
    assert rates is not None
    work = product("bf16", *shape, 2)
    share = work.flops / rates.gpu_seconds(work) / rates.peak_flops["bf16"]
    assert 0.3 < share < 0.9 or shape[0] > 1


def test_a_gpu_with_less_bandwidth_moves_bytes_slower_and_multiplies_as_fast() -> None:
    fast, slow = find_rates("h200"), find_rates("h100")
    assert fast is not None
    assert slow is not None
    moved = Work(Kind.MEMORY, "pointwise", 1 << 30)
    assert slow.gpu_seconds(moved) / fast.gpu_seconds(moved) == pytest.approx(4.8 / 3.35, rel=0.01)
    multiplied = product("bf16", 1, 8192, 8192, 8192, 2)
    assert slow.gpu_seconds(multiplied) == pytest.approx(fast.gpu_seconds(multiplied))


def test_causal_attention_takes_less_time_than_its_products_would() -> None:
    rates = find_rates("h200")
    assert rates is not None
    shape = (4, 32, 4096, 4096, 128)
    forward, backward = (
        Work(Kind.ATTENTION, "cudnn", 0, shape, halves=True, is_backward=each) for each in (False, True)
    )
    assert backward.flops == 2.5 * forward.flops == 2.5 * 2 * 4 * 32 * 4096**2 * 128
    assert 1.5 < rates.gpu_seconds(backward) / rates.gpu_seconds(forward) < 5


def test_a_call_costs_the_host_microseconds() -> None:
    rates = find_rates("h200")
    assert rates is not None
    assert all(0 <= rates.host_seconds(call) < 1e-3 for call in Host)
