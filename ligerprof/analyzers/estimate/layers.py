"""A decoder layer, family by family, as the tensor operations of transformers' modeling code."""

from ligerprof.analyzers.estimate.attention import attend
from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.fused import add_and_norm, gated_linear, takes_gates
from ligerprof.analyzers.estimate.kernel_call import call_kernel, kernel_memory, share_of
from ligerprof.analyzers.estimate.lora import add_adapter, add_adapter_to_quantized
from ligerprof.analyzers.estimate.norms import norm
from ligerprof.analyzers.estimate.operations import add, dropout, linear, linear_4bit, multiply, renamed, scale, unary
from ligerprof.analyzers.estimate.tape import Operation, Value
from ligerprof.roles import Role
from ligerprof.torch_memory.dtypes import FP32_BYTES


def run_layer(context: Context, value: Value, index: int, output_role: Role) -> Value:
    """One decoder layer on the residual stream `value`; the caller still holds its input."""
    if context.spec.model_type == "gpt2":
        return _gpt2_layer(context, value, f"transformer.h.{index}", output_role)
    return _llama_layer(context, value, f"model.layers.{index}", output_role)


def _llama_layer(context: Context, value: Value, name: str, output_role: Role) -> Value:
    """LlamaDecoderLayer.forward; Gemma 2 norms the outputs of both halves as well."""
    tape, four_norms = context.tape, context.spec.norms_per_layer == 4
    normed = norm(context, value, f"{name}.input_layernorm")
    attended, probabilities = _llama_attention(context, normed, f"{name}.self_attn")
    tape.release(normed)
    if four_norms:
        attended = renamed(context, attended, norm(context, attended, f"{name}.post_attention_layernorm"))
    middle_norm = f"{name}.{'pre_feedforward' if four_norms else 'post_attention'}_layernorm"
    middle, normed = add_and_norm(context, value, attended, middle_norm)
    fed = _gated_mlp(context, normed, f"{name}.mlp")
    tape.release(normed)
    if four_norms:
        fed = renamed(context, fed, norm(context, fed, f"{name}.post_feedforward_layernorm"))
    output = add(context, middle, fed, role=output_role)
    tape.release(fed, middle)
    if probabilities is not None:
        tape.release(probabilities)
    return output


def project(context: Context, value: Value, name: str) -> Value:
    """A linear layer of the model, with its bias and its adapter where it has them."""
    weight, bias = context.weights[f"{name}.weight"], context.weights.get(f"{name}.bias")
    if weight.packed_sizes:
        return add_adapter_to_quantized(context, value, linear_4bit(context, value, weight, bias), name)
    result = linear(context, value, weight, bias)
    return add_adapter(context, value, result, name) if f"{name}.lora_A" in context.weights else result


def _llama_attention(context: Context, value: Value, name: str) -> tuple[Value, Value | None]:
    tape = context.tape
    query, key, values = (project(context, value, f"{name}.{part}_proj") for part in "qkv")
    if f"{name}.q_norm.weight" in context.weights:
        query = renamed(
            context, query, norm(context, query, f"{name}.q_norm", rows=context.tokens * context.spec.heads)
        )
        key = renamed(context, key, norm(context, key, f"{name}.k_norm", rows=context.tokens * context.spec.kv_heads))
    turned_query, turned_key = _rotate_both(context, query, key)
    tape.release(query, key)
    attended, probabilities = attend(context, turned_query, turned_key, values, 0.0)
    output = project(context, attended, f"{name}.o_proj")
    tape.release(attended, turned_query, turned_key, values)
    return output, probabilities


def _rotate_both(context: Context, query: Value, key: Value) -> tuple[Value, Value]:
    """apply_rotary_pos_emb, or the kernel in its place: each of the two has its share of the kernel's memory."""
    if "rope" not in context.kernels:
        return _rotate(context, query), _rotate(context, key)
    memory = kernel_memory(context, "rope", query)
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


def _rotate(context: Context, value: Value) -> Value:
    """`value * cos + rotate_half(value) * sin`; the tables have the residual stream's dtype."""
    tape, width = context.tape, max(value.width, context.stream_bytes)
    upright = _times_table(context, value, width)
    half_bytes = value.size_bytes // 2
    turned = tape.run(
        Operation(
            elements=value.elements,
            width=value.width,
            inputs=(value,),
            # the negated half on the way, and a padded half of the gradient on the way back
            forward_scratch_bytes=half_bytes,
            backward_scratch_bytes=value.size_bytes,
        )
    )
    sideways = _times_table(context, turned, width)
    tape.release(turned)
    output = add(context, upright, sideways)
    tape.release(upright, sideways)
    return output


def _times_table(context: Context, value: Value, width: int) -> Value:
    """Times cos or sin; where they are wider, the gradient is made wide and cast."""
    return context.tape.run(
        Operation(
            elements=value.elements,
            width=width,
            inputs=(value,),
            backward_scratch_bytes=value.elements * width if width != value.width else 0,
        )
    )


def _gated_mlp(context: Context, value: Value, name: str) -> Value:
    """`down_proj(act(gate_proj(x)) * up_proj(x))`: SwiGLU and GeGLU."""
    tape = context.tape
    slot = context.spec.mlp
    if takes_gates(context, f"{name}.down_proj"):
        gate, up = (project(context, value, f"{name}.{part}_proj") for part in ("gate", "up"))
        output = gated_linear(context, gate, up, f"{name}.down_proj")
        tape.release(gate, up)
        return output
    if slot in context.kernels:
        product = _fused_gate(context, value, name, slot)
    else:
        activated = project(context, value, f"{name}.gate_proj")
        activated = renamed(context, activated, unary(context, activated))
        up = project(context, value, f"{name}.up_proj")
        product = multiply(context, activated, up)
        tape.release(activated, up)
    output = project(context, product, f"{name}.down_proj")
    tape.release(product)
    return output


def _fused_gate(context: Context, value: Value, name: str, slot: str) -> Value:
    gate, up = (project(context, value, f"{name}.{part}_proj") for part in ("gate", "up"))
    memory = kernel_memory(context, slot, gate)
    product = call_kernel(context, memory, {"gate": gate, "up": up}, elements=gate.elements, width=gate.width)
    context.tape.release(gate, up)
    return product


def _gpt2_layer(context: Context, value: Value, name: str, output_role: Role) -> Value:
    """GPT2Block.forward, dropout included: training mode keeps its masks."""
    tape, config = context.tape, context.spec.config
    residual_drop = float(config.get("resid_pdrop", 0.1))
    normed = norm(context, value, f"{name}.ln_1")
    joined = project(context, normed, f"{name}.attn.c_attn")
    query, key, values = tape.split(joined, 3)
    attended, probabilities = attend(context, query, key, values, float(config.get("attn_pdrop", 0.1)))
    projected = project(context, attended, f"{name}.attn.c_proj")
    tape.release(attended, query, key, values, joined)
    dropped = dropout(context, projected, residual_drop)
    tape.release(projected, normed)
    middle = add(context, dropped, value)
    tape.release(dropped)
    normed = norm(context, middle, f"{name}.ln_2")
    fed = _gpt2_mlp(context, normed, f"{name}.mlp", residual_drop)
    output = add(context, middle, fed, role=output_role)
    tape.release(normed, fed, middle)
    if probabilities is not None:
        tape.release(probabilities)
    return output


def _gpt2_mlp(context: Context, value: Value, name: str, drop: float) -> Value:
    tape = context.tape
    wide = project(context, value, f"{name}.c_fc")
    activated = _gelu_new(context, wide)
    tape.release(wide)
    output = project(context, activated, f"{name}.c_proj")
    tape.release(activated)
    dropped = dropout(context, output, drop)
    tape.release(output)
    return dropped


def _gelu_new(context: Context, value: Value) -> Value:
    """NewGELUActivation.forward: `0.5 * x * (1 + tanh(c * (x + 0.044715 * x ** 3)))`, a tensor for each step.

    Autocast raises to the power in fp32, and what follows stays so.
    """
    tape = context.tape
    half = scale(context, value)
    wide = context.cast(value, FP32_BYTES if context.half_bytes else value.width)
    cube = tape.run(
        Operation(
            elements=wide.elements,
            width=wide.width,
            inputs=(wide,),
            saves=(wide,),
            backward_scratch_bytes=2 * wide.size_bytes,
        )
    )
    term = renamed(context, cube, scale(context, cube))
    total = renamed(context, term, add(context, value, term))
    argument = renamed(context, total, scale(context, total))
    bent = renamed(context, argument, unary(context, argument, saves_output=True))
    shifted = tape.run(Operation(elements=bent.elements, width=bent.width, passes=(bent,)))
    tape.release(wide, bent)
    output = _times_wider(context, half, shifted)
    tape.release(half, shifted)
    return output


def _times_wider(context: Context, left: Value, right: Value) -> Value:
    """`left * right` where `right` may be wider: keeps both."""
    return context.tape.run(
        Operation(
            elements=right.elements,
            width=right.width,
            inputs=(left, right),
            saves=(left, right),
            backward_scratch_bytes=right.size_bytes if left.width != right.width else 0,
        )
    )
