"""Several residual streams: what spreads the embedding over them, merges them, and makes the layers' own inputs.

Formulas are those of transformers' modeling_gemma3n.py.
"""

from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.model import look_up
from ligerprof.analyzers.estimate.norms import norm
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.operations import add, linear, renamed, scale, scale_rows, square, unary
from ligerprof.analyzers.estimate.tensors import Value
from ligerprof.models.streams import Streams, StreamSizes
from ligerprof.roles import Role
from ligerprof.torch_memory.dtypes import INDEX_BYTES


def row_and_sizes(context: Context) -> tuple[Streams, StreamSizes]:
    """The module names of a decoder with several streams, and its sizes."""
    row, sizes = context.spec.architecture.streams, context.spec.streams
    assert row is not None
    assert sizes is not None
    return row, sizes


def spread_streams(context: Context, embedded: Value, role: Role) -> tuple[Value, Value, tuple[Value, ...]]:
    """The streams that the first layer reads, the inputs of all layers, and the parts that the decoder holds."""
    row, sizes = row_and_sizes(context)
    inputs = _layer_inputs(context, embedded)
    parts = _scaled_projections(context, [embedded] * sizes.count, row.spread)
    stream = _stacked(context, [embedded, *parts], role)
    return stream, inputs, parts


def merge_streams(context: Context, stream: Value) -> tuple[Value, tuple[Value, ...]]:
    """What the final norm reads, the mean of all streams, and the parts that the decoder holds."""
    row, sizes = row_and_sizes(context)
    tape, size = context.tape, stream.elements // sizes.count
    first, *others = (tape.slice(stream, size) for _ in range(sizes.count))
    parts = _scaled_projections(context, [first, *others], row.merge)
    joined = _stacked(context, [first, *parts], Role.ACTIVATIONS)
    tape.release(*others)
    mean = tape.run(Operation(elements=size, width=joined.width, inputs=(joined,)))
    tape.release(joined)
    return mean, (first, *parts)


def _layer_inputs(context: Context, embedded: Value) -> Value:
    """`get_per_layer_inputs` and `project_per_layer_inputs`."""
    tape, (row, _) = context.tape, row_and_sizes(context)
    ids = tape.run(Operation(elements=context.tokens, width=INDEX_BYTES))
    looked = look_up(context, f"{row.embedding}.weight", Role.ACTIVATIONS, ids=ids)
    looked = renamed(context, looked, scale(context, looked))
    weight = context.weights[f"{row.model_projection}.weight"]
    projected = linear(context, embedded, weight)
    scaled = tape.run(
        Operation(elements=projected.elements, width=projected.width, inputs=(projected,), view_of=projected)
    )
    tape.release(projected)
    normed = renamed(context, scaled, norm(context, scaled, row.projection_norm))
    total = add(context, normed, looked)
    output = scale(context, total)
    tape.release(total, normed, looked, ids)
    return output


def _scaled_projections(context: Context, sources: list[Value], module: str) -> tuple[Value, ...]:
    """Projections of all sources but the first, as long as the first."""
    tape, rows = context.tape, context.tokens
    magnitude = _root_of_mean(context, sources[0], rows)
    parts = []
    for index, source in enumerate(sources[1:]):
        projected = linear(context, source, context.weights[f"{module}.{index}.weight"])
        current = context.cast(projected, context.stream_bytes)
        own = _root_of_mean(context, current, rows, clamps=True)
        product = scale_rows(context, current, magnitude)
        parts.append(_divide_rows(context, product, own))
        tape.release(product, own, current, projected)
    tape.release(magnitude)
    return tuple(parts)


def _root_of_mean(context: Context, value: Value, rows: int, *, clamps: bool = False) -> Value:
    """The root of the mean square of each token."""
    tape = context.tape
    wide = context.cast_for("pow.Tensor_Scalar", value)
    squares = square(context, wide)
    mean = tape.run(Operation(elements=rows, width=wide.width, inputs=(squares,)))
    tape.release(squares, wide)
    if clamps:
        mean = renamed(context, mean, unary(context, mean))
    return renamed(context, mean, unary(context, mean, saves_output=clamps))


def _divide_rows(context: Context, value: Value, divisors: Value) -> Value:
    """`value / divisors` with one divisor per row."""
    width = max(value.width, divisors.width)
    return context.tape.run(
        Operation(
            elements=value.elements,
            width=width,
            inputs=(value, divisors),
            saves=(value, divisors),
            # `-grad * ((self / other) / other)` of the divisors holds each result, before it is summed over the row
            backward_scratch_bytes=4 * value.elements * width,
        )
    )


def _stacked(context: Context, parts: list[Value], role: Role) -> Value:
    """`torch.stack`: the parts receive views of its gradient."""
    width = max(part.width for part in parts)
    return context.tape.run(
        Operation(
            elements=sum(part.elements for part in parts),
            width=width,
            inputs=tuple(part for part in parts if part.width != width),
            passes=tuple(part for part in parts if part.width == width),
            role=role,
            gradient_role=role if role is Role.ACTIVATIONS else Role.ACTIVATIONS,
        )
    )
