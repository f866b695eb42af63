"""A decoder layer as the tensor operations of transformers' modeling code, read from the architecture's row."""

from dataclasses import replace

from ligerprof.analyzers.estimate.attention import attend
from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.dora import add_dora
from ligerprof.analyzers.estimate.fused import add_and_norm, gated_linear, takes_gates
from ligerprof.analyzers.estimate.kernel_call import call_kernel, kernel_memory, share_of
from ligerprof.analyzers.estimate.lora import add_adapter, add_adapter_to_quantized
from ligerprof.analyzers.estimate.model import has_fp32_tables
from ligerprof.analyzers.estimate.norms import norm
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.operations import (
    add,
    dropout,
    linear,
    linear_4bit,
    multiply,
    renamed,
    saved_factors,
    scale,
    unary,
)
from ligerprof.analyzers.estimate.tensors import Value
from ligerprof.kernels.slots import find_slot
from ligerprof.models.architecture import Dropout, Feature
from ligerprof.roles import Role
from ligerprof.torch_memory.dtypes import FP32_BYTES


def run_layer(context: Context, value: Value, index: int, output_role: Role) -> Value:
    """Run one decoder layer on the residual stream `value`, which the caller still holds."""
    tape, row = context.tape, context.spec.architecture
    name, norms = f"{row.layers}.{index}", row.layer_norms
    residual_drop = None if row.residual_dropout is None else row.residual_dropout.dropout
    normed = _normed(context, value, name, norms.before_attention)
    added, probabilities = _attention(context, normed, f"{name}.{row.attention.name}")
    tape.release(normed)
    added = _dropped(context, _renormed(context, added, name, norms.after_attention), residual_drop)
    middle, normed = _add_and_norm(context, value, added, name)
    fed = _mlp(context, normed, f"{name}.{row.mlp.name}")
    if not norms.held_in_mlp:
        tape.release(normed)
    fed = _dropped(context, _renormed(context, fed, name, norms.after_mlp), residual_drop)
    output = add(context, middle, fed, role=output_role)
    if norms.held_in_mlp:
        tape.release(normed)
    tape.release(fed, middle)
    if probabilities is not None:
        tape.release(probabilities)
    return output


def _normed(context: Context, value: Value, layer: str, name: str | None) -> Value:
    """A sublayer's input: normed, or one more reference to `value`."""
    return context.tape.name(value) if name is None else norm(context, value, f"{layer}.{name}")


def _renormed(context: Context, value: Value, layer: str, name: str | None) -> Value:
    """A sublayer's output, normed in its variable if the architecture norms it."""
    return value if name is None else renamed(context, value, norm(context, value, f"{layer}.{name}"))


def _add_and_norm(context: Context, residual: Value, added: Value, layer: str) -> tuple[Value, Value]:
    """The residual stream between the sublayers, and the MLP's input."""
    name = context.spec.architecture.layer_norms.before_mlp
    if name is not None:
        return add_and_norm(context, residual, added, f"{layer}.{name}")
    middle = renamed(context, added, add(context, residual, added))
    return middle, context.tape.name(middle)


def project(context: Context, value: Value, name: str) -> Value:
    """A linear layer of the model, with its bias and its adapter, if any."""
    weight, bias = context.weights[f"{name}.weight"], context.weights.get(f"{name}.bias")
    is_packed, is_adapted = bool(weight.packed_sizes), f"{name}.lora_A" in context.weights
    result = (linear_4bit if is_packed else linear)(context, value, weight, bias)
    if not is_adapted:
        return result
    if context.recipe.dora:
        return add_dora(context, value, result, name)
    return (add_adapter_to_quantized if is_packed else add_adapter)(context, value, result, name)


def _attention(context: Context, value: Value, name: str) -> tuple[Value, Value | None]:
    tape, row = context.tape, context.spec.architecture.attention
    query, key, values, *joined = _query_key_value(context, value, name)
    if row.qk_norms is not None:
        query, key = (
            renamed(context, item, norm(context, item, f"{name}.{norm_name}"))
            for item, norm_name in zip((query, key), row.qk_norms, strict=True)
        )
    turned_query, turned_key = query, key
    if row.rotary is not None:
        turned_query, turned_key = rotate_both(context, query, key)
        tape.release(query, key)
    attended, probabilities = attend(context, turned_query, turned_key, values)
    output = project(context, attended, f"{name}.{row.out}")
    tape.release(attended, turned_query, turned_key, values, *joined)
    return _dropped(context, output, row.output_dropout), probabilities


def _query_key_value(context: Context, value: Value, name: str) -> tuple[Value, ...]:
    """Query, key and value, and the joint tensor if one projection computes all three."""
    row, spec = context.spec.architecture.attention, context.spec
    projected = tuple(project(context, value, f"{name}.{item}") for item in row.qkv)
    if len(projected) > 1:
        return projected
    (joint,) = projected
    if not row.slices:
        return (*context.tape.split(joint, 3), joint)
    widths = (spec.head_dim * heads for heads in (spec.heads, spec.kv_heads, spec.kv_heads))
    return (*(context.tape.slice(joint, context.tokens * width) for width in widths), joint)


def _dropped(context: Context, value: Value, rate: Dropout | None) -> Value:
    """A sublayer's output after its dropout."""
    return value if rate is None else renamed(context, value, dropout(context, value, context.spec.dropout_rate(rate)))


def rotate_both(context: Context, query: Value, key: Value) -> tuple[Value, Value]:
    """apply_rotary_pos_emb, or the kernel in its place: each of the two has its share of the kernel's memory."""
    slot = find_slot(Feature.ROTARY).name
    if not context.is_fused(slot):
        return _rotate_by_reference(context, query, key) if slot in context.kernels else _rotate(context, query, key)
    memory = kernel_memory(context, slot, query)
    if len(context.spec.architecture.attention.qkv) == 1:
        # slices of one tensor are not written in place
        memory = replace(memory, output_bytes=query.size_bytes + key.size_bytes)
    turned = [
        call_kernel(
            context,
            share_of(memory, item.elements, query.elements + key.elements),
            {"x": item},
            elements=item.elements,
            width=item.width,
        )
        for item in (query, key)
    ]
    return turned[0], turned[1]


def _rotate_by_reference(context: Context, query: Value, key: Value) -> tuple[Value, Value]:
    """kernels/rope/reference.py: halves are chunks, whose gradients are joined, and each sum is cast back."""

    def rotate(value: Value) -> Value:
        wide = _turn(context, value, turn_back_bytes=value.size_bytes // 2)
        return renamed(context, wide, context.cast(wide, value.width))

    return rotate(query), rotate(key)


def _rotate(context: Context, query: Value, key: Value) -> tuple[Value, Value]:
    """apply_rotary_pos_emb as the architecture writes it."""
    row = context.spec.architecture.attention.rotary
    assert row is not None
    if row.share is not None:
        parts = [_cut_rotated(context, item) for item in (query, key)]
        joined = [_join_rotated(context, *part) for part in parts]
        return joined[0], joined[1]
    turned = [_turn(context, item) for item in (query, key)]
    if has_fp32_tables(context.recipe):
        cast = [context.cast(wide, item.width) for wide, item in zip(turned, (query, key), strict=True)]
        context.tape.release(*turned)
        turned = cast
    return turned[0], turned[1]


def _cut_rotated(context: Context, value: Value) -> tuple[Value, Value]:
    """The rotated part of each head (`value` itself if all of it is rotated), and the rest."""
    tape, spec = context.tape, context.spec
    elements = value.elements // spec.head_dim * spec.rotary_dim
    rotated = tape.name(value) if elements == value.elements else tape.slice(value, elements)
    return rotated, tape.slice(value, value.elements - elements)


def _join_rotated(context: Context, part: Value, rest: Value) -> Value:
    """Concatenate the rotated part and the rest; their gradients are views of its gradient."""
    turned = _turn(context, part)
    joined = context.tape.run(
        Operation(elements=turned.elements + rest.elements, width=turned.width, passes=(turned, rest))
    )
    context.tape.release(turned, part, rest)
    return joined


def _turn(context: Context, value: Value, turn_back_bytes: int | None = None) -> Value:
    """`value * cos + rotate_half(value) * sin`; the tables are fp32 or have the residual stream's dtype.

    `turn_back_bytes` is what rotate_half's backward holds next to its result: by default a padded half of it.
    """
    table_bytes = FP32_BYTES if has_fp32_tables(context.recipe) else context.stream_bytes
    tape, width = context.tape, max(value.width, table_bytes)
    upright = _times_table(context, value, width)
    half_bytes = value.size_bytes // 2
    turned = tape.run(
        Operation(
            elements=value.elements,
            width=value.width,
            inputs=(value,),
            # the negated half
            forward_scratch_bytes=half_bytes,
            backward_scratch_bytes=value.size_bytes if turn_back_bytes is None else turn_back_bytes,
        )
    )
    sideways = _times_table(context, turned, width)
    tape.release(turned)
    output = add(context, upright, sideways)
    tape.release(upright, sideways)
    return output


def _times_table(context: Context, value: Value, width: int) -> Value:
    """Multiply by cos or sin; with wider tables, the gradient is computed in their dtype and cast."""
    return context.tape.run(
        Operation(
            elements=value.elements,
            width=width,
            inputs=(value,),
            backward_scratch_bytes=value.elements * width if width != value.width else 0,
        )
    )


def _mlp(context: Context, value: Value, name: str) -> Value:
    row = context.spec.architecture.mlp
    if row.gate is None:
        output = _plain_mlp(context, value, name)
    else:
        output = _gated_mlp(context, value, name, find_slot(row.gate).name)
    return _dropped(context, output, row.dropout)


def _gated_mlp(context: Context, value: Value, name: str, slot: str) -> Value:
    """`down_proj(act(gate_proj(x)) * up_proj(x))`: SwiGLU and GeGLU."""
    tape, row = context.tape, context.spec.architecture.mlp
    down = f"{name}.{row.down}"
    if takes_gates(context, down):
        gate, up, *joint = _gate_and_up(context, value, name)
        output = gated_linear(context, gate, up, down)
        tape.release(gate, up, *joint)
        return output
    held: list[Value] = []
    if slot in context.kernels:
        gate, up, *joint = _gate_and_up(context, value, name)
        product = gated_product(context, gate, up, slot)
        tape.release(gate, up, *joint)
    elif len(row.inputs) == 1:
        # the code keeps the gate in a variable, and with it the joint tensor
        gate, up, *held = _gate_and_up(context, value, name)
        product = gated_product(context, gate, up, slot)
        tape.release(gate, up)
    else:
        gate_name, up_name = row.inputs
        activated = project(context, value, f"{name}.{gate_name}")
        activated = renamed(context, activated, unary(context, activated))
        up = project(context, value, f"{name}.{up_name}")
        product = multiply(context, activated, up)
        tape.release(activated, up)
    output = project(context, product, down)
    tape.release(product, *held)
    return output


def _gate_and_up(context: Context, value: Value, name: str) -> tuple[Value, ...]:
    """Gate and up, and the joint tensor if one projection computes both."""
    projected = tuple(project(context, value, f"{name}.{item}") for item in context.spec.architecture.mlp.inputs)
    return projected if len(projected) > 1 else (*context.tape.split(projected[0], 2), projected[0])


def gated_product(context: Context, gate: Value, up: Value, slot: str) -> Value:
    """`act(gate) * up` by the kernel in the slot, fused or plain torch."""
    if context.is_fused(slot):
        memory = kernel_memory(context, slot, gate)
        return call_kernel(context, memory, {"gate": gate, "up": up}, elements=gate.elements, width=gate.width)
    activated = unary(context, gate)
    product = multiply(context, activated, up)
    context.tape.release(activated)
    return product


def _plain_mlp(context: Context, value: Value, name: str) -> Value:
    """Two linear layers around GPT-2's activation."""
    tape, row = context.tape, context.spec.architecture.mlp
    wide = project(context, value, f"{name}.{row.inputs[0]}")
    activated = _gelu_new(context, wide)
    tape.release(wide)
    output = project(context, activated, f"{name}.{row.down}")
    tape.release(activated)
    return output


def _gelu_new(context: Context, value: Value) -> Value:
    """NewGELUActivation.forward: `0.5 * x * (1 + tanh(c * (x + 0.044715 * x ** 3)))`, a tensor for each step.

    Autocast raises to the power in fp32, and what follows stays so.
    """
    tape = context.tape
    half = scale(context, value)
    wide = context.cast_for("pow.Tensor_Scalar", value)
    cube = tape.run(
        Operation(
            elements=wide.elements,
            width=wide.width,
            inputs=(wide,),
            saves=(wide,),
            backward_scratch_bytes=2 * wide.size_bytes,
        )
    )
    tape.release(wide)
    term = renamed(context, cube, scale(context, cube))
    total = renamed(context, term, add(context, value, term))
    argument = renamed(context, total, scale(context, total))
    bent = renamed(context, argument, unary(context, argument, saves_output=True))
    shifted = tape.run(Operation(elements=bent.elements, width=bent.width, passes=(bent,)))
    tape.release(bent)
    output = _times_wider(context, half, shifted)
    tape.release(half, shifted)
    return output


def _times_wider(context: Context, left: Value, right: Value) -> Value:
    """`left * right` where `right` may be wider: keeps both.

    Both gradients are made wide, then the left one is cast. The engine frees what the product saved after the cast;
    checkpointing's unpack hooks hand it over for good, so it is gone before.
    """
    tape, widens = context.tape, left.width != right.width
    wide = Operation(elements=left.elements, width=right.width, inputs=(left,), view_of=left)
    read = tape.run(wide) if widens and context.unpacks_once else tape.name(left)
    output = tape.run(
        Operation(
            elements=right.elements,
            width=right.width,
            inputs=(read, right),
            saves=saved_factors(read, right),
            backward_scratch_bytes=right.size_bytes if read.width != right.width else 0,
        )
    )
    tape.release(read)
    return output
