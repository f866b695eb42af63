"""Integer arithmetic of launches, in plain Python.

Triton's own functions of these names are wrapped for use in kernels, and cost several microseconds a call on the host.
"""


def ceil_div(value: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-value // divisor)


def round_up(value: int, multiple: int) -> int:
    """The value, rounded up to a multiple."""
    return ceil_div(value, multiple) * multiple


def next_power_of_2(value: int) -> int:
    """The smallest power of two that is at least `value`, which is positive."""
    return 1 << (value - 1).bit_length()
