"""The activation functions of transformers (activations.py) as tensor operations."""

from collections.abc import Callable, Mapping

from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.operations import (
    add,
    multiply_wide,
    renamed,
    saved_factors,
    scale,
    square,
    unary,
)
from ligerprof.analyzers.estimate.tensors import Value, Weight
from ligerprof.models import ModelSpec
from ligerprof.models.layer_tensors import RawWeight
from ligerprof.torch_memory.dtypes import FP32_BYTES


def activate(context: Context, value: Value, function: str) -> Value:
    """Apply the function that a config names; `value` stays with the caller."""
    return {**ACTIVATIONS, **_LEARNED}[function](context, value)


def is_covered(spec: ModelSpec) -> bool:
    """Whether the tape has the model's activation function, and the architecture the weights that it reads."""
    name, tensors = spec.activation, spec.architecture.tensors
    has_weights = any(isinstance(item, RawWeight) and item.activation == name for item in tensors)
    return name in ACTIVATIONS or (name in _LEARNED and has_weights)


def _saves_output(context: Context, value: Value) -> Value:
    return unary(context, value, saves_output=True)


def _relu_squared(context: Context, value: Value) -> Value:
    """ReLUSquaredActivation.forward: autocast squares in fp32."""
    bent = unary(context, value, saves_output=True)
    wide = context.cast_for("pow.Tensor_Scalar", bent)
    squared = square(context, wide)
    context.tape.release(wide, bent)
    return squared


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
    return _times_one_plus_tanh(context, half, argument)


def _gelu_fast(context: Context, value: Value) -> Value:
    """FastGELUActivation.forward: `0.5 * x * (1 + tanh(c * x * (1 + 0.044715 * x * x)))`, a tensor for each step."""
    tape = context.tape
    half, slope, part = (scale(context, value) for _ in range(3))
    square_term = multiply_wide(context, part, value)
    tape.release(part)
    shifted = tape.run(Operation(elements=value.elements, width=value.width, passes=(square_term,)))
    tape.release(square_term)
    argument = multiply_wide(context, slope, shifted)
    tape.release(slope, shifted)
    return _times_one_plus_tanh(context, half, argument)


def _times_one_plus_tanh(context: Context, half: Value, argument: Value) -> Value:
    """`half * (1 + tanh(argument))`, which takes over both."""
    tape = context.tape
    bent = renamed(context, argument, unary(context, argument, saves_output=True))
    shifted = tape.run(Operation(elements=bent.elements, width=bent.width, passes=(bent,)))
    tape.release(bent)
    output = multiply_wide(context, half, shifted)
    tape.release(half, shifted)
    return output


def _xielu(context: Context, value: Value) -> Value:
    """XIELUActivation._xielu_python: `where(x > 0, p * x * x + b * x, (expm1(min(x, e)) - x) * n + b * x)`.

    The learned numbers p and n are vectors of one element, which widen a product if they are wider.
    """
    tape, row = context.tape, context.spec.architecture
    module = f"{row.layers}.{context.layer}.{row.mlp.name}.{row.mlp.activation}"
    positive, negative = (_softplus(context, context.weights[f"{module}.alpha_{sign}"]) for sign in "pn")
    negative = renamed(context, negative, tape.run(Operation(elements=1, width=negative.width, passes=(negative,))))
    is_positive = tape.run(Operation(elements=value.elements, width=1))
    factor = _times_number(context, value, positive)
    squared = renamed(context, factor, multiply_wide(context, value, factor))
    first = _plus_line(context, squared, value)
    lowest = tape.run(
        Operation(
            elements=value.elements,
            width=value.width,
            inputs=(value,),
            saves=(value,),
            # half of the gradient, for equal elements, which ones these are, and which ones are larger
            backward_scratch_bytes=value.size_bytes + 2 * value.elements,
        )
    )
    wide = renamed(context, lowest, context.cast_for("expm1", lowest))
    bent = renamed(context, wide, _exp_minus_one(context, wide))
    distance = tape.run(
        Operation(
            elements=bent.elements,
            width=bent.width,
            inputs=(value,),
            passes=(bent,),
            backward_scratch_bytes=bent.size_bytes if bent.width != value.width else 0,
        )
    )
    tape.release(bent)
    term = renamed(context, distance, _times_number(context, distance, negative))
    second = _plus_line(context, term, value)
    output = tape.run(
        Operation(
            elements=first.elements,
            width=max(first.width, second.width),
            inputs=(first, second),
            saves=(is_positive,),
        )
    )
    tape.release(is_positive, first, second, positive, negative)
    return output


def _exp_minus_one(context: Context, value: Value) -> Value:
    """`expm1`, whose gradient is multiplied by the output plus one."""
    return context.tape.run(
        Operation(
            elements=value.elements,
            width=value.width,
            inputs=(value,),
            saves_output=True,
            backward_scratch_bytes=value.size_bytes,
        )
    )


def _softplus(context: Context, weight: Weight) -> Value:
    """`softplus` of a learned number, which autocast computes in fp32."""
    width = weight.width if context.half_bytes is None else FP32_BYTES
    return context.tape.run(Operation(elements=weight.elements, width=width, inputs=(weight,), saves=(weight,)))


def _times_number(context: Context, value: Value, number: Value) -> Value:
    """`number * value`: saves both."""
    width = max(value.width, number.width)
    size_bytes = value.elements * width
    # the gradient of a narrower tensor is computed wide; gradient times value, before it is summed
    scratch_bytes = (size_bytes if number.needs_gradient else 0) + (size_bytes if width != value.width else 0)
    return context.tape.run(
        Operation(
            elements=value.elements,
            width=width,
            inputs=(value, number),
            saves=saved_factors(value, number),
            backward_scratch_bytes=scratch_bytes,
        )
    )


def _plus_line(context: Context, value: Value, line: Value) -> Value:
    """`value + b * line`, which takes over `value`."""
    scaled = scale(context, line)
    total = add(context, value, scaled)
    context.tape.release(value, scaled)
    return total


ACTIVATIONS: Mapping[str, Callable[[Context, Value], Value]] = {
    **dict.fromkeys(("silu", "swish", "gelu", "gelu_pytorch_tanh", "hardswish"), unary),
    **dict.fromkeys(("relu", "sigmoid", "tanh"), _saves_output),
    "relu2": _relu_squared,
    "gelu_new": _gelu_new,
    "gelu_fast": _gelu_fast,
}
# functions with weights
_LEARNED: Mapping[str, Callable[[Context, Value], Value]] = {"xielu": _xielu}
