"""Lower bounds for kernels: the fewest bytes that they must move."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from ligerprof.runs.bench.shapes import BenchShape


class Direction(str, Enum):
    """What is timed: `full` is forward and backward in one."""

    FORWARD = "forward"
    BACKWARD = "backward"
    FULL = "full"


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """What an operation must move: each input read and each result written once, small ones left out.

    Attributes:
        elements: size of the tensors that count, which are alike.
        forward, backward, full: how many of them; None if a pass alone has no such number.
    """

    elements: Callable[[BenchShape], int]
    forward: int | None
    backward: int | None
    full: int


def fewest_bytes(moved: Moved | None, shape: BenchShape, element_bytes: int, direction: Direction) -> int | None:
    """Bytes that any implementation must read and write, None where no such count is fair."""
    if moved is None:
        return None
    counts = {Direction.FORWARD: moved.forward, Direction.BACKWARD: moved.backward, Direction.FULL: moved.full}
    count = counts[direction]
    return None if count is None else count * moved.elements(shape) * element_bytes
