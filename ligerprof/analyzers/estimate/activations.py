"""The activation functions of transformers (activations.py) as tensor operations."""

from collections.abc import Callable, Mapping

from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.operations import add, multiply_wide, renamed, scale, square, unary
from ligerprof.analyzers.estimate.tensors import Value


def activate(context: Context, value: Value, function: str) -> Value:
    """Apply the function that a config names; `value` stays with the caller."""
    return ACTIVATIONS[function](context, value)


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


ACTIVATIONS: Mapping[str, Callable[[Context, Value], Value]] = {
    **dict.fromkeys(("silu", "swish", "gelu", "gelu_pytorch_tanh", "hardswish"), unary),
    **dict.fromkeys(("relu", "sigmoid", "tanh"), _saves_output),
    "relu2": _relu_squared,
    "gelu_new": _gelu_new,
    "gelu_fast": _gelu_fast,
}
