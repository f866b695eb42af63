"""A decoder layer as the tensor operations of transformers' modeling code, read from the architecture's row."""

from ligerprof.analyzers.estimate.activations import activate
from ligerprof.analyzers.estimate.attention import attend
from ligerprof.analyzers.estimate.context import Context, is_eager
from ligerprof.analyzers.estimate.delta_net import delta_net, short_conv
from ligerprof.analyzers.estimate.dora import add_dora
from ligerprof.analyzers.estimate.expert_batches import add_routed, run_all_experts
from ligerprof.analyzers.estimate.experts import add_shared_expert, run_experts
from ligerprof.analyzers.estimate.fused import add_and_norm, adds_in_norm, gated_linear, takes_gates
from ligerprof.analyzers.estimate.kernel_call import call_kernel, kernel_memory
from ligerprof.analyzers.estimate.latent import latent_query_key_value
from ligerprof.analyzers.estimate.lora import add_adapter, add_adapter_to_quantized
from ligerprof.analyzers.estimate.norms import bare_rms_norm, norm
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.operations import (
    add,
    dropout,
    linear,
    linear_4bit,
    linear_8bit,
    multiply,
    renamed,
    scale,
    unary,
)
from ligerprof.analyzers.estimate.rotary import rotate_both
from ligerprof.analyzers.estimate.scaled_dot_product import as_heads
from ligerprof.analyzers.estimate.state_space import mix_states
from ligerprof.analyzers.estimate.tensors import Value
from ligerprof.kernels.slots import find_slot
from ligerprof.models.architecture import Feature
from ligerprof.models.config_keys import Dropout
from ligerprof.models.mixtures import Experts
from ligerprof.roles import Role
from ligerprof.torch_memory.dtypes import FP32_BYTES


def run_layer(context: Context, value: Value, index: int, output_role: Role) -> Value:
    """Run one decoder layer on the residual stream `value`, which the caller still holds."""
    tape, row = context.tape, context.spec.architecture
    name, norms = f"{row.layers}.{index}", row.layer_norms
    residual_drop = None if row.residual_dropout is None else row.residual_dropout.dropout
    normed = _normed(context, value, name, norms.before_attention)
    if context.spec.layer_kinds.recurrent[index]:
        mix = delta_net if row.delta is not None else short_conv if row.short_conv is not None else mix_states
        added, probabilities = mix(context, normed, name, project), None
    elif row.state_space is not None and row.state_space.layers is None:
        return _run_hybrid(context, value, normed, name, output_role)
    else:
        added, probabilities = _attention(context, normed, f"{name}.{row.attention.name}")
    if context.spec.parallel is not None:
        output = _add_parallel_mlp(context, value, normed, added, name, output_role)
        if probabilities is not None:
            tape.release(probabilities)
        return output
    held = [tape.name(normed)] if "attention input" in norms.held else []
    tape.release(normed)
    added = _renormed(context, added, name, norms.after_attention)
    if row.residual_dropout is not None and row.residual_dropout.after_attention is not None:
        added = _dropped(context, added, residual_drop)
    held += [tape.name(added)] if "attention output" in norms.held else []
    middle, normed = _add_and_norm(context, value, added, name)
    held += [tape.name(normed)] if "mlp input" in norms.held else []
    fed = _mlp(context, normed, f"{name}.{row.mlp.name}")
    tape.release(normed)
    fed = _dropped(context, _renormed(context, fed, name, norms.after_mlp), residual_drop)
    scaled = _scaled(context, fed)
    output = add(context, middle, scaled, role=output_role)
    tape.release(*held, scaled, fed, middle)
    if probabilities is not None:
        tape.release(probabilities)
    return output


def _run_hybrid(context: Context, value: Value, normed: Value, layer: str, output_role: Role) -> Value:
    """A layer whose Mamba-2 mixer and attention read the same norm: variables hold both outputs to the end."""
    tape, row = context.tape, context.spec.architecture
    mixed = mix_states(context, normed, layer, project)
    mixed = renamed(context, mixed, scale(context, mixed))
    read = scale(context, normed)
    attended, probabilities = _attention(context, read, f"{layer}.{row.attention.name}")
    tape.release(read)
    attended = renamed(context, attended, scale(context, attended))
    added = renamed(context, normed, add(context, mixed, attended))
    middle = renamed(context, added, add(context, value, added))
    normed = norm(context, middle, f"{layer}.{row.layer_norms.before_mlp}")
    fed = renamed(context, normed, _mlp(context, normed, f"{layer}.{row.mlp.name}"))
    output = add(context, middle, fed, role=output_role)
    tape.release(fed, middle, mixed, attended)
    if probabilities is not None:
        tape.release(probabilities)
    return output


def _add_parallel_mlp(
    context: Context, value: Value, normed: Value, attended: Value, layer: str, output_role: Role
) -> Value:
    """An MLP that reads the layer's input too: both sublayers' outputs are added to it."""
    tape, row = context.tape, context.spec.architecture
    drops, own_norm = row.residual_dropout, f"{layer}.{row.layer_norms.before_mlp}"
    has_own_norm = f"{own_norm}.weight" in context.weights
    if drops is not None and drops.after_attention is not None:
        attended = _dropped(context, attended, drops.dropout)
    read = normed
    if has_own_norm:
        tape.release(normed)
        read = norm(context, value, own_norm)
    fed = _mlp(context, read, f"{layer}.{row.mlp.name}")
    if has_own_norm:
        tape.release(read)
    fed = _dropped(context, fed, None if drops is None else drops.dropout)
    first, second, last = {
        "stream": (value, attended, fed),
        "mlp": (fed, attended, value),
        "attention": (attended, fed, value),
    }[context.spec.parallel or "stream"]
    total = add(context, first, second)
    output = add(context, total, last, role=output_role)
    tape.release(total, attended, fed)
    if not has_own_norm:
        tape.release(normed)
    return output


def _scaled(context: Context, value: Value) -> Value:
    """A sublayer's output times the layer's multiplier, if the architecture has one."""
    scales = context.spec.architecture.layer_norms.scales_sublayers is not None
    return scale(context, value) if scales else context.tape.name(value)


def _normed(context: Context, value: Value, layer: str, name: str | None) -> Value:
    """A sublayer's input: normed, or one more reference to `value`."""
    return context.tape.name(value) if name is None else norm(context, value, f"{layer}.{name}")


def _renormed(context: Context, value: Value, layer: str, name: str | None) -> Value:
    """A sublayer's output, normed in its variable if the architecture norms it."""
    if name is None or f"{layer}.{name}.weight" not in context.weights:
        return value
    return renamed(context, value, norm(context, value, f"{layer}.{name}"))


def _add_and_norm(context: Context, residual: Value, added: Value, layer: str) -> tuple[Value, Value]:
    """The residual stream between the sublayers, and the MLP's input."""
    name = context.spec.architecture.layer_norms.before_mlp
    scaled = _scaled(context, added)
    if name is not None and adds_in_norm(context):
        context.tape.release(added)
        return add_and_norm(context, residual, scaled, f"{layer}.{name}")
    middle = add(context, residual, scaled)
    context.tape.release(scaled, added)
    return middle, context.tape.name(middle) if name is None else norm(context, middle, f"{layer}.{name}")


def project(context: Context, value: Value, name: str) -> Value:
    """A linear layer of the model, with its bias and its adapter, if any."""
    weight, bias = context.weights[f"{name}.weight"], context.weights.get(f"{name}.bias")
    is_packed, is_adapted = bool(weight.packed_sizes), f"{name}.lora_A" in context.weights
    multiply_by = {None: linear, 4: linear_4bit, 8: linear_8bit}[context.recipe.packed_bits if is_packed else None]
    result = multiply_by(context, value, weight, bias)
    if not is_adapted:
        return result
    if context.recipe.dora:
        return add_dora(context, value, result, name)
    return (add_adapter_to_quantized if is_packed else add_adapter)(context, value, result, name)


def _attention(context: Context, value: Value, name: str) -> tuple[Value, Value | None]:
    tape, row = context.tape, context.spec.architecture.attention
    if context.spec.latent is not None:
        query, key, values, *held = latent_query_key_value(context, value, name, context.spec.latent, project)
        attended, probabilities = attend(context, query, key, values)
        output = project(context, attended, f"{name}.{row.out}")
        tape.release(attended, query, key, values, *held)
        return output, probabilities
    query, key, values, *joined = _query_key_value(context, value, name)
    gate: Value | None = None
    if row.gated:
        query, gate = _cut_gate(context, query)
    if not (row.norms_projected or row.norms_rotated):
        query, key = _norm_heads(context, query, key, name)
    turned_query, turned_key = query, key
    if context.rotates:
        turned_query, turned_key, *parts = rotate_both(context, query, key)
        tape.release(query, key)
        joined += parts
    if row.scales_query:
        turned_query = renamed(context, turned_query, scale(context, turned_query))
    if row.norms_rotated:
        turned_query, turned_key = _norm_heads(context, turned_query, turned_key, name)
    if row.bare_norms is not None and context.rotates and context.spec.setting(row.bare_norms):
        normed = [bare_rms_norm(context, item, context.spec.head_dim) for item in (turned_query, turned_key)]
        turned_query, turned_key = renamed(context, turned_query, normed[0]), renamed(context, turned_key, normed[1])
    if row.tempers_unrotated is not None and not context.rotates and context.spec.setting(row.tempers_unrotated):
        turned_query = renamed(context, turned_query, _tempered(context, turned_query))
    attended, probabilities = attend(context, turned_query, turned_key, values)
    if gate is not None:
        opened = unary(context, gate, saves_output=True)
        attended = renamed(context, attended, multiply(context, attended, opened))
        tape.release(opened)
        joined.append(gate)
    output = project(context, attended, f"{name}.{row.out}")
    tape.release(attended, turned_query, turned_key, values, *joined)
    return _dropped(context, output, row.output_dropout), probabilities


def _cut_gate(context: Context, joint: Value) -> tuple[Value, Value]:
    """Query and gate, which lie next to each other for each head: the gate is copied."""
    query, gate = context.tape.split(joint, 2)
    copied = context.tape.run(Operation(elements=gate.elements, width=gate.width, passes=(gate,)))
    context.tape.release(joint, gate)
    return query, copied


def _tempered(context: Context, query: Value) -> Value:
    """The query times one fp32 number per token, cast back."""
    product = context.tape.run(
        Operation(
            elements=query.elements,
            width=FP32_BYTES,
            inputs=(query,),
            # the gradient is computed in fp32 and cast
            backward_scratch_bytes=query.elements * FP32_BYTES if query.width != FP32_BYTES else 0,
        )
    )
    return renamed(context, product, context.cast(product, query.width))


def _norm_heads(context: Context, query: Value, key: Value, name: str) -> tuple[Value, Value]:
    """Query and key after their norms, if the architecture and the config have them."""
    norms = context.spec.architecture.attention.qk_norms
    if norms is None or f"{name}.{norms[0]}.weight" not in context.weights:
        return query, key
    normed_query = renamed(context, query, norm(context, query, f"{name}.{norms[0]}"))
    return normed_query, renamed(context, key, norm(context, key, f"{name}.{norms[1]}"))


def _project_head(context: Context, value: Value, name: str, which: int) -> Value:
    """Query, key or value, or all of them as one joint tensor."""
    row = context.spec.architecture.attention
    projected = project(context, value, f"{name}.{row.qkv[which]}")
    if _comes_by_heads(context, which):
        projected = renamed(context, projected, as_heads(context, projected))
    norms = row.qk_norms if row.norms_projected else None
    if norms is None or which >= len(norms) or f"{name}.{norms[which]}.weight" not in context.weights:
        return projected
    return renamed(context, projected, norm(context, projected, f"{name}.{norms[which]}"))


def _comes_by_heads(context: Context, which: int) -> bool:
    """Whether the gradient of query, key or value comes with its heads apart, as eager attention computes it.

    The view of a projection as heads has it copied; norms between the two are not known to pass it on as it is.
    """
    row, spec = context.spec.architecture.attention, context.spec
    turns = which < 2 and context.rotates and find_slot(Feature.ROTARY).name in context.kernels
    if not is_eager(context.recipe) or len(row.qkv) == 1 or row.qk_norms is not None or turns:
        return False
    return (spec.heads if which == 0 else spec.kv_heads) > 1


def _query_key_value(context: Context, value: Value, name: str) -> tuple[Value, ...]:
    """Query, key and value, and the joint tensor if one projection computes all three."""
    row, spec = context.spec.architecture.attention, context.spec
    projected = tuple(_project_head(context, value, name, which) for which in range(len(row.qkv)))
    if row.scales_parts:
        query, key, values = projected
        return query, renamed(context, key, scale(context, key)), values
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


def _mlp(context: Context, value: Value, name: str) -> Value:
    row = context.spec.architecture.mlp
    if row.experts is not None and context.spec.layer_kinds.sparse[context.layer]:
        output = _run_experts(context, value, name, row.experts)
    elif row.gate is None:
        output = _plain_mlp(context, value, name)
    else:
        shared = None if row.experts is None else row.experts.shared
        module = f"{name.rpartition('.')[0]}.{shared.name}" if shared is not None and shared.in_layer else name
        output = _gated_mlp(context, value, module, find_slot(row.gate).name)
    return _dropped(context, output, row.dropout)


def _run_experts(context: Context, value: Value, name: str, row: Experts) -> Value:
    expert, gate = row.shared if context.spec.shared_size else None, context.spec.architecture.mlp.gate
    if row.multiplies_all:
        assert expert is not None
        assert gate is not None
        routed, variables = run_all_experts(context, value, name, row)
        output = _gated_mlp(context, value, f"{name}.{expert.name}", find_slot(gate).name)
        return add_routed(context, output, routed, variables)
    if expert is None or gate is None:
        output, variables = run_experts(context, value, name, row)
        context.tape.release(*variables)
        return output
    slot, module = find_slot(gate).name, name.rpartition(".")[0] if expert.in_layer else name
    shared = None if expert.runs_last else _gated_mlp(context, value, f"{module}.{expert.name}", slot)
    output, variables = run_experts(context, value, name, row)
    if shared is None:
        shared = _gated_mlp(context, value, f"{module}.{expert.name}", slot)
    weight = None if expert.gate is None else project(context, value, f"{name}.{expert.gate}")
    output = add_shared_expert(context, output, shared, weight)
    context.tape.release(*variables)
    return output


def _gated_mlp(context: Context, value: Value, name: str, slot: str) -> Value:
    """`down_proj(act(gate_proj(x)) * up_proj(x))`: SwiGLU and GeGLU."""
    tape, row = context.tape, context.spec.architecture.mlp
    down = f"{name}.{row.down}"
    if takes_gates(context, down):
        gate, up, *joint = _gate_and_up(context, value, name)
        output = gated_linear(context, gate, up, down)
        tape.release(gate, up, *joint)
        return _scaled_output(context, output)
    held: list[Value] = []
    if slot in context.kernels:
        gate, up, *joint = _gate_and_up(context, value, name)
        product = gated_product(context, gate, up, slot)
        # Python frees a tuple's items from the last one on
        tape.release(up, gate, *joint)
    elif row.multipliers is not None:
        product = _scaled_product(context, value, name)
    elif len(row.inputs) == 1:
        # the code keeps the gate in a variable, and with it the joint tensor
        gate, up, *held = _gate_and_up(context, value, name)
        product = gated_product(context, gate, up, slot)
        tape.release(gate, up)
    else:
        gate_name, up_name = row.inputs
        activated = project(context, value, f"{name}.{gate_name}")
        activated = renamed(context, activated, activate(context, activated, context.spec.activation))
        up = project(context, value, f"{name}.{up_name}")
        product = multiply(context, activated, up)
        tape.release(activated, up)
    output = _scaled_output(context, project(context, product, down))
    tape.release(product, *held)
    return output


def _scaled_output(context: Context, output: Value) -> Value:
    """The output of a gated MLP times the number that the architecture may have for it."""
    scales = context.spec.architecture.mlp.multipliers is not None
    return renamed(context, output, scale(context, output)) if scales else output


def _scaled_product(context: Context, value: Value, name: str) -> Value:
    """`up_proj(x) * act(gate_proj(x) * number)`."""
    gate_name, up_name = context.spec.architecture.mlp.inputs
    up = project(context, value, f"{name}.{up_name}")
    gate = project(context, value, f"{name}.{gate_name}")
    gate = renamed(context, gate, scale(context, gate))
    activated = renamed(context, gate, activate(context, gate, context.spec.activation))
    product = multiply(context, up, activated)
    context.tape.release(activated, up)
    return product


def _gate_and_up(context: Context, value: Value, name: str) -> tuple[Value, ...]:
    """Gate and up, and the joint tensor if one projection computes both."""
    row = context.spec.architecture.mlp
    if row.multipliers is not None:
        gate = project(context, value, f"{name}.{row.inputs[0]}")
        gate = renamed(context, gate, scale(context, gate))
        return gate, project(context, value, f"{name}.{row.inputs[1]}")
    projected = tuple(project(context, value, f"{name}.{item}") for item in row.inputs)
    return projected if len(projected) > 1 else (*context.tape.split(projected[0], 2), projected[0])


def gated_product(context: Context, gate: Value, up: Value, slot: str) -> Value:
    """`act(gate) * up` by the kernel in the slot, fused or plain torch."""
    if context.is_fused(slot):
        memory = kernel_memory(context, slot, gate)
        return call_kernel(context, memory, {"gate": gate, "up": up}, elements=gate.elements, width=gate.width)
    activated = activate(context, gate, context.spec.activation)
    product = multiply(context, activated, up)
    context.tape.release(activated)
    return product


def _plain_mlp(context: Context, value: Value, name: str) -> Value:
    """Two linear layers around an activation."""
    tape, row = context.tape, context.spec.architecture.mlp
    wide = project(context, value, f"{name}.{row.inputs[0]}")
    activated = activate(context, wide, context.spec.activation)
    tape.release(wide)
    output = project(context, activated, f"{name}.{row.down}")
    tape.release(activated)
    return output
