"""The activation functions of transformers: by their tapes, and one that has weights."""

from collections.abc import Callable, Mapping

from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.operations import add, multiply_wide, renamed, saved_factors, scale
from ligerprof.analyzers.estimate.operators import Replay
from ligerprof.analyzers.estimate.tensors import Value, Weight
from ligerprof.models import ModelSpec
from ligerprof.models.architecture import RawWeight
from ligerprof.models.layer_tape import activation_functions, function_tape
from ligerprof.torch_memory.dtypes import FP32_BYTES


def activate(context: Context, value: Value, function: str) -> Value:
    """Apply the function that a config names; `value` stays with the caller."""
    learned = _LEARNED.get(function)
    return Replay(context, value).run(function_tape(function)) if learned is None else learned(context, value)


def is_covered(spec: ModelSpec) -> bool:
    """Whether there is a tape of the model's activation function, or the architecture has the weights that it reads."""
    name, tensors = spec.activation, spec.architecture.tensors
    has_weights = any(isinstance(item, RawWeight) and item.activation == name for item in tensors)
    return name in activation_functions() or (name in _LEARNED and has_weights)


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
            elements=first.elements, width=max(first.width, second.width), inputs=(first, second), saves=(is_positive,)
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


# functions with weights
_LEARNED: Mapping[str, Callable[[Context, Value], Value]] = {"xielu": _xielu}
