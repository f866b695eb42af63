"""What a layer has instead of attention, on the tape: a gated delta net, or a convolution between two gates."""

from collections.abc import Callable

from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.delta_rule import gated_delta_rule
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.operations import (
    multiply,
    multiply_wide,
    renamed,
    row_root,
    saved_factors,
    scale_columns,
    scale_rows,
    square,
    unary,
)
from ligerprof.analyzers.estimate.tensors import Value
from ligerprof.models.mixers import DeltaNet, DeltaSizes
from ligerprof.torch_memory.dtypes import FP32_BYTES

Project = Callable[[Context, Value, str], Value]


def delta_net(context: Context, value: Value, layer: str, project: Project) -> Value:
    """`Qwen3NextGatedDeltaNet` on its normed input, which the caller still holds."""
    tape, row, sizes = context.tape, context.spec.architecture.delta, context.spec.delta
    assert row is not None
    assert sizes is not None
    name = f"{layer}.{row.name}"
    read = without_padding(context, value)
    if row.interleaves:
        mixed, gate, strength, rate, *held = _interleaved(context, read, name, row, project)
    else:
        mixed, gate, strength, rate, *held = (project(context, read, f"{name}.{item}") for item in row.inputs)
    mixed = renamed(context, mixed, convolved(context, mixed, f"{name}.conv1d"))
    mixed = renamed(context, mixed, unary(context, mixed))
    query, key, values = tape.split(mixed, tuple(context.tokens * size for size in _parts(sizes)))
    tape.release(*held[2:])
    written = unary(context, strength, saves_output=True)
    decay = _decay(context, rate, name)
    output = gated_delta_rule(context, sizes, (query, key, values), decay, written)
    normed = _gated_norm(context, output, gate, f"{name}.norm", sizes)
    result = project(context, normed, f"{name}.out_proj")
    tape.release(normed, output, decay, written, query, key, values, mixed, gate, strength, rate, *held[:2], read)
    return result


def _parts(sizes: DeltaSizes) -> tuple[int, int, int]:
    """Elements per token of query, key and value."""
    return sizes.keys, sizes.keys, sizes.values


def without_padding(context: Context, value: Value) -> Value:
    """Times the mask of tokens, if some are padding."""
    if not context.recipe.padding:
        return context.tape.name(value)
    return context.tape.run(Operation(elements=value.elements, width=value.width, inputs=(value,)))


def _copied(context: Context, value: Value, *, copies: bool) -> Value:
    """`reshape`: a copy of heads that lie apart, which takes over `value`."""
    if not copies:
        return value
    return renamed(
        context, value, context.tape.run(Operation(elements=value.elements, width=value.width, passes=(value,)))
    )


def _interleaved(context: Context, value: Value, name: str, row: DeltaNet, project: Project) -> tuple[Value, ...]:
    """Query, key and value in one tensor, gate, strength and rate; then what variables hold."""
    tape, sizes = context.tape, context.spec.delta
    assert sizes is not None
    several = sizes.key_heads > 1
    joint, rates = (project(context, value, f"{name}.{item}") for item in row.inputs)
    widths = (*_parts(sizes), sizes.values)
    query, key, values, gate = tape.split(joint, tuple(context.tokens * size for size in widths))
    strength, rate = tape.split(rates, 2)
    grouped = several and sizes.repeats > 1
    values, gate, strength, rate = (_copied(context, item, copies=grouped) for item in (values, gate, strength, rate))
    query, key = (_copied(context, item, copies=several) for item in (query, key))
    values = _copied(context, values, copies=several and not grouped)
    mixed = tape.run(
        Operation(
            elements=sum((query.elements, key.elements, values.elements)),
            width=query.width,
            passes=(query, key, values),
        )
    )
    return mixed, gate, strength, rate, joint, rates, query, key, values


def short_conv(context: Context, value: Value, layer: str, project: Project) -> Value:
    """`Lfm2ShortConv` on its normed input, which the caller still holds: a convolution between two gates."""
    tape, row = context.tape, context.spec.architecture.short_conv
    assert row is not None
    name = f"{layer}.{row.name}"
    read = without_padding(context, value)
    joint = project(context, read, f"{name}.in_proj")
    first, last, parts = tape.split(joint, 3)
    gated = multiply(context, first, parts)
    mixed = renamed(context, gated, convolved(context, gated, f"{name}.conv"))
    product = multiply(context, last, mixed)
    output = project(context, product, f"{name}.out_proj")
    tape.release(product, mixed, first, last, parts, joint, read)
    return output


def convolved(context: Context, value: Value, name: str) -> Value:
    """`causal_conv1d_fn` without an activation: a convolution over the tokens of each channel; the first outputs."""
    tape, weight = context.tape, context.weights[f"{name}.weight"]
    wide = context.cast(value, weight.width)
    read = context.autocast(wide)
    tape.release(wide)
    # a view of the weight, so that autocast does not keep its copy
    factor = weight if weight.width == read.width else context.cast_weight(weight, read.width)
    rows = context.recipe.rows * (context.recipe.row_tokens + weight.shape[-1] - 1)
    bias = context.weights.get(f"{name}.bias")
    output = tape.run(
        Operation(
            elements=rows * (value.elements // context.tokens),
            width=read.width,
            inputs=(read, factor) if bias is None else (read, factor, context.autocast_weight(bias)),
            # whatever the gradient is for
            saves=(read, factor),
        )
    )
    tape.release(read)
    if isinstance(factor, Value):
        tape.release(factor)
    return renamed(context, output, tape.slice(output, value.elements))


def _decay(context: Context, rate: Value, name: str) -> Value:
    """`-A_log.float().exp() * softplus(rate.float() + dt_bias)`, in fp32."""
    tape, rates, shift = context.tape, context.weights[f"{name}.A_log"], context.weights[f"{name}.dt_bias"]
    raised = tape.run(Operation(elements=rates.elements, width=FP32_BYTES, inputs=(rates,), saves_output=True))
    negated = renamed(context, raised, tape.run(Operation(elements=rates.elements, width=FP32_BYTES, inputs=(raised,))))
    wide = context.cast(rate, FP32_BYTES)
    shifted = tape.run(Operation(elements=rate.elements, width=FP32_BYTES, inputs=(shift,), passes=(wide,)))
    tape.release(wide)
    soft = renamed(context, shifted, unary(context, shifted))
    output = tape.run(
        Operation(
            elements=rate.elements,
            width=FP32_BYTES,
            inputs=(negated, soft),
            saves=saved_factors(negated, soft),
            # the gradient of the factors before it is summed
            backward_scratch_bytes=soft.size_bytes,
        )
    )
    tape.release(negated, soft)
    return output


def _gated_norm(context: Context, value: Value, gate: Value, name: str, sizes: DeltaSizes) -> Value:
    """`RMSNormGated`: the norm of each head in its dtype, times the activated gate in fp32, cast back."""
    tape, weight = context.tape, context.weights[f"{name}.weight"]
    wide = context.cast(value, FP32_BYTES)
    squares = square(context, wide)
    root = row_root(context, squares, value.elements // sizes.value_dim)
    scaled = renamed(context, wide, scale_rows(context, wide, root))
    narrow = renamed(context, scaled, context.cast(scaled, value.width))
    weighted = renamed(context, narrow, scale_columns(context, narrow, weight))
    wide_gate = context.cast(gate, FP32_BYTES)
    bent = renamed(context, wide_gate, unary(context, wide_gate))
    product = renamed(context, weighted, multiply_wide(context, weighted, bent))
    tape.release(bent, root)
    return renamed(context, product, context.cast(product, value.width))
