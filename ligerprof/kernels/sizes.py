"""Integer arithmetic of launches, in plain Python.

Triton's own functions of these names are wrapped for use in kernels, and cost several microseconds a call on the host.
"""

from collections.abc import Iterator


def ceil_div(value: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-value // divisor)


def round_up(value: int, multiple: int) -> int:
    """The value, rounded up to a multiple."""
    return ceil_div(value, multiple) * multiple


def next_power_of_2(value: int) -> int:
    """The smallest power of two that is at least `value`, which is positive."""
    return 1 << (value - 1).bit_length()


def slices_of(start: int, stop: int, size: int) -> Iterator[slice]:
    """Slices of one size, but for the last one, from `start` to `stop`."""
    for first in range(start, stop, max(size, 1)):
        yield slice(first, min(first + size, stop))
