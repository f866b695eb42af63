"""The gates of experts whose weights interleave gate and up."""

from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.operations import multiply, renamed, scale, unary
from ligerprof.analyzers.estimate.tensors import Value


def clamped_product(context: Context, joint: Value) -> Value:
    """GptOssExperts._apply_gate: `(up + 1) * gate * sigmoid(alpha * gate)` of clamped, interleaved gate and up."""
    tape, half = context.tape, joint.elements // 2
    raw = tape.slice(joint, half), tape.slice(joint, half)
    gate = renamed(context, raw[0], unary(context, raw[0]))
    up = renamed(context, raw[1], unary(context, raw[1]))
    scaled = scale(context, gate)
    factor = renamed(context, scaled, unary(context, scaled, saves_output=True))
    gated = multiply(context, gate, factor)
    tape.release(factor)
    shifted = tape.run(Operation(elements=half, width=up.width, passes=(up,)))
    product = multiply(context, shifted, gated)
    tape.release(shifted, gated, gate, up)
    return product
