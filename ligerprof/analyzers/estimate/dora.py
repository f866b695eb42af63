"""DoRA as in peft: LoRA with a trained magnitude per output, divided by the norm of the adapted weight.

peft 0.21, tuners/lora/dora.py, DoraLinearLayer.forward, and variants.py, DoraLinearVariant.forward.
"""

from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.operations import add, column_sum, dropout, linear, renamed, scale
from ligerprof.analyzers.estimate.tensors import Tensor, Value
from ligerprof.roles import Role
from ligerprof.torch_memory.dtypes import FP32_BYTES, highest_bytes
from ligerprof.torch_memory.saved_tensors import MM


def add_dora(context: Context, value: Value, result: Value, name: str) -> Value:
    """`result + (m - 1) * base + m * lora_B(lora_A(x)) * scaling`, cast back, with m = magnitude / norm.

    `base` is the result without the layer's bias. With dropout, `x` is the dropped input, and `base` a second product
    of the weight.
    """
    tape, rate = context.tape, context.recipe.lora_dropout
    read = context.cast(value, context.weights[f"{name}.lora_A"].width)
    dropped = dropout(context, read, rate)
    magnitude = context.weights[f"{name}.lora_magnitude"]
    weight, held = _measure_weight(context, name)
    factor = tape.run(
        Operation(
            elements=magnitude.elements, width=FP32_BYTES, inputs=(magnitude,), extra_saved_bytes=magnitude.size_bytes
        )
    )
    thin = linear(context, dropped, context.weights[f"{name}.lora_A"])
    product = renamed(context, thin, linear(context, thin, context.weights[f"{name}.lora_B"]))
    base = linear(context, dropped, weight) if rate else _without_bias(context, result, name)
    less_one = tape.run(Operation(elements=factor.elements, width=FP32_BYTES, passes=(factor,)))
    left = _times_row(context, base, less_one)
    right = _times_row(context, product, factor)
    right = renamed(context, right, scale(context, right))
    added = add(context, left, right)
    tape.release(left, right, less_one, factor, product, base, *held)
    total = add(context, result, added)
    tape.release(added, dropped)
    output = context.cast(total, result.width)
    tape.release(read, total, result)
    return output


def _without_bias(context: Context, result: Value, name: str) -> Value:
    """`result - bias`, in fp32 if the bias is; the result itself without one."""
    bias = context.weights.get(f"{name}.bias")
    if bias is None:
        return context.tape.name(result)
    width = max(result.width, bias.width)
    inputs, passes = ((), (result,)) if width == result.width else ((result,), ())
    return context.tape.run(Operation(elements=result.elements, width=width, inputs=inputs, passes=passes))


def _measure_weight(context: Context, name: str) -> tuple[Tensor, list[Value]]:
    """get_lora_weight and get_weight_norm: multiply an identity matrix through the adapter, and sum with the weight.

    Returns:
        the weight in the adapter's dtype, and what the function's variables hold until it returns; no gradient flows
        through any of it.
    """
    tape, adapter = context.tape, context.weights[f"{name}.lora_A"]
    rank, inputs = adapter.shape
    outputs = context.weights[f"{name}.lora_B"].shape[0]
    width = context.half_bytes or adapter.width
    identity = tape.run(Operation(elements=inputs * inputs, width=adapter.width))
    read = context.cast(identity, width)
    thin = tape.run(Operation(elements=inputs * rank, width=width, is_product=True, operator=MM, factor=(inputs, rank)))
    keeps_graph = tape.saving and adapter.needs_gradient
    if not keeps_graph:
        tape.release(read)
    wide = tape.run(
        Operation(elements=inputs * outputs, width=width, is_product=True, operator=MM, factor=(rank, outputs))
    )
    if not keeps_graph:
        tape.release(thin)
    tape.release(identity)
    delta = renamed(context, wide, context.cast(wide, adapter.width))
    kept = [delta]
    if keeps_graph:
        kept += [read, thin]
    weight: Tensor = context.weights[f"{name}.weight"]
    if weight.width != adapter.width:
        weight = tape.run(Operation(elements=inputs * outputs, width=adapter.width, role=Role.WEIGHT_CASTS))
        kept.append(weight)
    # the scaled product and its sum with the weight
    norm = Operation(elements=outputs, width=adapter.width, forward_scratch_bytes=2 * delta.size_bytes)
    kept.append(tape.run(norm))
    return weight, kept


def _times_row(context: Context, value: Value, row: Value) -> Value:
    """`row * value` in fp32 with one factor per column: saves both."""
    product_bytes = value.elements * FP32_BYTES
    sum_bytes = highest_bytes(column_sum(context, value.elements, row.elements, FP32_BYTES))
    # the gradient of a 16-bit value is fp32 until the factor's has been summed
    wider_bytes = product_bytes - value.size_bytes if value.needs_gradient else 0
    return context.tape.run(
        Operation(
            elements=value.elements,
            width=FP32_BYTES,
            inputs=(value, row),
            saves=(value, row) if value.needs_gradient else (value,),
            backward_scratch_bytes=product_bytes + wider_bytes,
            reduction_scratch_bytes=product_bytes + wider_bytes + sum_bytes,
        )
    )
