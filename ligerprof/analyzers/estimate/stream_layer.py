"""A decoder layer of several residual streams: AltUp predicts and corrects them around attention and MLP.

Formulas are those of transformers' modeling_gemma3n.py.
"""

from collections.abc import Callable

from ligerprof.analyzers.estimate.activations import activate
from ligerprof.analyzers.estimate.attention import attend
from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.norms import bare_rms_norm, norm
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.operations import (
    add,
    linear,
    multiply,
    multiply_wide,
    product_operator,
    renamed,
    saved_factors,
    scale,
    scale_columns,
    unary,
)
from ligerprof.analyzers.estimate.rotary import rotate_one
from ligerprof.analyzers.estimate.streams import row_and_sizes
from ligerprof.analyzers.estimate.tensors import Value
from ligerprof.kernels.slots import find_slot
from ligerprof.roles import Role
from ligerprof.torch_memory.dtypes import FP32_BYTES
from ligerprof.torch_memory.selective import BMM

Project = Callable[[Context, Value, str], Value]
GatedMlp = Callable[[Context, Value, str, str], Value]


def run_stream_layer(
    context: Context, value: Value, index: int, output_role: Role, parts: tuple[Project, GatedMlp]
) -> Value:
    """Gemma3nTextDecoderLayer on the streams `value`, which the caller still holds; its variables live to the end.

    Args:
        parts: a linear layer with its adapter, and an MLP with a kernel in it.
    """
    tape, row, (project, gated_mlp) = context.tape, context.spec.architecture, parts
    name, norms = f"{row.layers}.{index}", row.layer_norms
    predictions = _predicted(context, value, name)
    active = tape.slice(predictions, _active_elements(context, value))
    normed = norm(context, active, f"{name}.{norms.before_attention}")
    laurel = _laurel(context, normed, name, project)
    attended, probabilities = _attention(context, normed, f"{name}.{row.attention.name}", project)
    attended = renamed(context, attended, norm(context, attended, f"{name}.{norms.after_attention}"))
    gated = add(context, active, attended)
    total = add(context, gated, laurel)
    middle = renamed(context, total, scale(context, total))
    middle_normed = norm(context, middle, f"{name}.{norms.before_mlp}")
    slot = None if row.mlp.gate is None else find_slot(row.mlp.gate).name
    if slot is not None and slot in context.kernels and not context.spec.layer_kinds.thinned[index]:
        fed = gated_mlp(context, middle_normed, f"{name}.{row.mlp.name}", slot)
    else:
        fed = _mlp(context, middle_normed, f"{name}.{row.mlp.name}", project)
    fed_normed = norm(context, fed, f"{name}.{norms.after_mlp}")
    activated = add(context, middle, fed_normed)
    corrected = _corrected(context, predictions, activated, name, output_role)
    added = _own_input(context, corrected, name, index, project)
    output = _add_to_others(context, corrected, added)
    held = (active, normed, laurel, attended, gated, middle, middle_normed, fed, fed_normed, activated, added)
    tape.release(*held, corrected, predictions)
    if probabilities is not None:
        tape.release(probabilities)
    return output


def _active_elements(context: Context, streams: Value) -> int:
    return streams.elements // row_and_sizes(context)[1].count


def _modalities(context: Context, value: Value, name: str) -> Value:
    """`compute_router_modalities`: one number for each stream and token."""
    row, _ = row_and_sizes(context)
    tape, module = context.tape, f"{name}.{row.altup}"
    normed = norm(context, value, f"{module}.{row.router_norm}")
    scaled = renamed(context, normed, scale(context, normed))
    routed = linear(context, scaled, context.weights[f"{module}.{row.router}.weight"])
    wide = context.cast(routed, FP32_BYTES)
    bent = renamed(context, wide, unary(context, wide, saves_output=True))
    output = renamed(context, bent, context.cast(bent, value.width))
    tape.release(scaled, routed)
    return output


def _predicted(context: Context, streams: Value, name: str) -> Value:
    """`predict`: a product of the streams of each token with its coefficients, which are added in place."""
    row, _ = row_and_sizes(context)
    tape = context.tape
    active = tape.slice(streams, _active_elements(context, streams))
    modalities = _modalities(context, active, name)
    tape.release(active)
    coefficients = linear(context, modalities, context.weights[f"{name}.{row.altup}.{row.prediction}.weight"])
    read, factors = context.autocast(streams), context.autocast(coefficients)
    product = tape.run(
        Operation(
            elements=streams.elements,
            width=read.width,
            inputs=(read, factors),
            saves=saved_factors(read, factors),
            operator=BMM,
        )
    )
    tape.release(read, factors)
    # in place on a view: the gradient of the tensor below is new, and that of the addend a copy
    total = tape.run(
        Operation(elements=product.elements, width=product.width, inputs=(product, streams), view_of=product)
    )
    tape.release(product)
    ordered = tape.run(Operation(elements=total.elements, width=total.width, passes=(total,)))
    output = context.cast(ordered, streams.width)
    tape.release(ordered, total, coefficients, modalities)
    return output


def _corrected(context: Context, predictions: Value, activated: Value, name: str, role: Role) -> Value:
    """`correct`: what the layer changed, times a coefficient for each stream, added to the predictions in place."""
    row, sizes = row_and_sizes(context)
    tape = context.tape
    modalities = _modalities(context, activated, name)
    predicted = tape.slice(predictions, activated.elements)
    change = tape.run(
        Operation(elements=activated.elements, width=activated.width, inputs=(predicted,), passes=(activated,))
    )
    tape.release(predicted)
    repeated = renamed(
        context,
        change,
        tape.run(Operation(elements=sizes.count * change.elements, width=change.width, inputs=(change,))),
    )
    coefficients = _correction(context, modalities, f"{name}.{row.altup}.{row.correction}.weight")
    width = max(repeated.width, coefficients.width)
    product = tape.run(
        Operation(
            elements=repeated.elements,
            width=width,
            inputs=(repeated, coefficients),
            saves=saved_factors(repeated, coefficients),
            # gradient times change, before it is summed over the width
            backward_scratch_bytes=repeated.elements * width,
            role=role,
        )
    )
    total = tape.run(
        Operation(elements=product.elements, width=width, passes=(product, predictions), view_of=product, role=role)
    )
    tape.release(product, coefficients, repeated, modalities)
    return total


def _correction(context: Context, modalities: Value, name: str) -> Value:
    """The coefficients of the correction, by weights that are limited first, plus one."""
    tape, weight, (row, sizes) = context.tape, context.weights[name], row_and_sizes(context)
    if context.spec.setting(row.clip) is None:
        product = linear(context, modalities, weight)
    else:
        clamped = tape.run(Operation(elements=weight.elements, width=weight.width, inputs=(weight,), saves=(weight,)))
        read, factor = context.autocast(modalities), context.autocast(clamped)
        product = tape.run(
            Operation(
                elements=context.tokens * sizes.count,
                width=read.width,
                inputs=(factor, read),
                saves=saved_factors(read, factor),
                gradient_is_view=True,
                is_product=True,
                operator=product_operator(None),
                factor=(sizes.count, sizes.count),
            )
        )
        tape.release(read, factor, clamped)
    return renamed(
        context, product, tape.run(Operation(elements=product.elements, width=product.width, passes=(product,)))
    )


def _laurel(context: Context, value: Value, name: str, project: Project) -> Value:
    """The Laurel block: a narrow projection and back, normed and added."""
    row, _ = row_and_sizes(context)
    module, (left, right) = f"{name}.{row.laurel}", row.laurel_linears
    narrow = project(context, value, f"{module}.{left}")
    wide = renamed(context, narrow, project(context, narrow, f"{module}.{right}"))
    normed = norm(context, wide, f"{module}.{row.laurel_norm}")
    output = add(context, value, normed)
    context.tape.release(wide, normed)
    return output


def _own_input(context: Context, corrected: Value, name: str, index: int, project: Project) -> Value:
    """What the layer's own input adds to the streams: gated by the active one, projected and normed."""
    row, _ = row_and_sizes(context)
    tape = context.tape
    view = tape.slice(corrected, _active_elements(context, corrected))
    value = renamed(context, view, tape.run(Operation(elements=view.elements, width=view.width, passes=(view,))))
    if context.spec.setting(row.corrects_scale):
        weight = context.weights[f"{name}.{row.altup}.{row.scale}"]
        read = context.cast(value, weight.width)
        scaled = scale_columns(context, read, weight)
        tape.release(read)
        value = renamed(context, value, renamed(context, scaled, context.cast(scaled, value.width)))
    gate = renamed(context, value, project(context, value, f"{name}.{row.gate}"))
    bent = renamed(context, gate, activate(context, gate, context.spec.activation))
    own = context.across.input_of(index)
    product = renamed(context, bent, multiply_wide(context, bent, own))
    projected = renamed(context, product, project(context, product, f"{name}.{row.projection}"))
    return renamed(context, projected, norm(context, projected, f"{name}.{row.norm}"))


def _add_to_others(context: Context, streams: Value, added: Value) -> Value:
    """`streams[1:] += added`: in place on a view, and then that view is copied onto itself.

    Each of both makes a gradient for all streams, and hands on a copy of the part.
    """
    tape, elements = context.tape, streams.elements - _active_elements(context, streams)
    part_bytes = elements * streams.width
    total = tape.run(
        Operation(
            elements=streams.elements,
            width=streams.width,
            inputs=(streams, added),
            view_of=streams,
            backward_scratch_bytes=part_bytes,
        )
    )
    part = tape.slice(total, elements)
    output = tape.run(
        Operation(
            elements=streams.elements,
            width=streams.width,
            inputs=(total, part),
            view_of=total,
            # zeros, the gradient of what was overwritten
            backward_scratch_bytes=part_bytes,
        )
    )
    tape.release(part, total)
    return output


def _attention(context: Context, value: Value, name: str, project: Project) -> tuple[Value, Value | None]:
    """Gemma3nTextAttention: query and key are rotated in a call each, values are normed, and layers reuse both."""
    tape, row, kinds = context.tape, context.spec.architecture.attention, context.spec.layer_kinds
    assert row.qk_norms is not None
    windowed, sharing = kinds.windowed[context.layer], kinds.sharing[context.layer]
    query = _normed_and_turned(context, project(context, value, f"{name}.{row.qkv[0]}"), f"{name}.{row.qk_norms[0]}")
    if sharing == "reuses":
        key, values = (tape.name(item) for item in context.across.states[windowed])
    else:
        key = _normed_and_turned(context, project(context, value, f"{name}.{row.qkv[1]}"), f"{name}.{row.qk_norms[1]}")
        values = project(context, value, f"{name}.{row.qkv[2]}")
        values = renamed(context, values, bare_rms_norm(context, values, context.spec.head_dim))
        if sharing == "stores":
            context.across.store(tape, windowed, key, values)
    attended, probabilities = attend(context, query, key, values)
    output = project(context, attended, f"{name}.{row.out}")
    tape.release(attended, query, key, values)
    return output, probabilities


def _normed_and_turned(context: Context, value: Value, name: str) -> Value:
    normed = renamed(context, value, norm(context, value, name))
    # the streams are in fp32 under autocast
    width = context.stream_bytes if context.half_bytes is None else FP32_BYTES
    return renamed(context, normed, rotate_one(context, normed, width))


def _mlp(context: Context, value: Value, name: str, project: Project) -> Value:
    """Gemma3nTextMLP, whose variables live until it returns."""
    tape, row = context.tape, context.spec.architecture.mlp
    gate = project(context, value, f"{name}.{row.inputs[0]}")
    if context.spec.layer_kinds.thinned[context.layer]:
        gate = renamed(context, gate, _thinned(context, gate))
    activated = activate(context, gate, context.spec.activation)
    up = project(context, value, f"{name}.{row.inputs[1]}")
    product = multiply(context, activated, up)
    output = project(context, product, f"{name}.{row.down}")
    tape.release(product, up, activated, gate)
    return output


def _thinned(context: Context, gate: Value) -> Value:
    """`_gaussian_topk`: gates below a quantile of their row's normal distribution become zero."""
    tape, rows = context.tape, context.tokens
    mean = tape.run(Operation(elements=rows, width=gate.width, inputs=(gate,)))
    deviation = tape.run(
        Operation(
            elements=rows,
            width=gate.width,
            inputs=(gate,),
            saves=(gate,),
            saves_output=True,
            backward_scratch_bytes=gate.size_bytes,
        )
    )
    term = scale(context, deviation)
    cutoff = renamed(context, term, add(context, mean, term))
    rest = tape.run(
        Operation(
            elements=gate.elements,
            width=gate.width,
            inputs=(cutoff,),
            passes=(gate,),
            # the negated gradient, before it is summed over the row
            reduction_scratch_bytes=gate.size_bytes,
        )
    )
    output = renamed(context, rest, unary(context, rest, saves_output=True))
    tape.release(cutoff, deviation, mean)
    return output
