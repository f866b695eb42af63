"""How fast a kernel could be at best: the fewest bytes it must move."""

from enum import Enum

from ligerprof.runs.bench.shapes import BenchShape


class Direction(str, Enum):
    """What is timed: `full` is forward and backward in one."""

    FORWARD = "forward"
    BACKWARD = "backward"
    FULL = "full"


def _hidden(shape: BenchShape) -> int:
    return shape.tokens * shape.hidden


def _gated(shape: BenchShape) -> int:
    return shape.tokens * shape.intermediate


def _rotated(shape: BenchShape) -> int:
    return shape.tokens * (shape.heads + shape.kv_heads) * shape.head_dim


# kernel: (elements of one plane, planes moved forward, planes moved backward), each input read and each result
# written once; weights, statistics and angles are too small to count
_PLANES = {
    # x in, y out; dy and x in, dx out
    "rms": (_hidden, 2, 3),
    "layernorm": (_hidden, 2, 3),
    # x and residual in, sum and y out; dy, dsum and sum in, one gradient for both out
    "add_rms": (_hidden, 4, 4),
    # queries and keys in and out, either way
    "rope": (_rotated, 2, 2),
    # gate and up in, product out; its gradient, gate and up in, two gradients out
    "swiglu": (_gated, 3, 5),
    "geglu": (_gated, 3, 5),
}


def fewest_bytes(kernel: str, shape: BenchShape, element_bytes: int, direction: Direction) -> int | None:
    """Bytes the operation must read and write whoever computes it; None where no such count is fair.

    The losses make their gradient in whichever direction they like, so only both together have a floor: logits
    read and their gradient written, once each. The fused loss is bound by products and not by bytes.
    """
    if kernel == "flce" or (kernel == "ce" and direction is not Direction.FULL):
        return None
    if kernel == "ce":
        return 2 * shape.tokens * shape.vocab * element_bytes
    plane, forward, backward = _PLANES[kernel]
    planes = {Direction.FORWARD: forward, Direction.BACKWARD: backward, Direction.FULL: forward + backward}
    return plane(shape) * planes[direction] * element_bytes
