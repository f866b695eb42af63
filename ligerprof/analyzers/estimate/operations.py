"""The tensor operations of decoders, each with the tensors that autograd saves and the memory of its gradient."""

from collections.abc import Sequence

from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.tensors import Tensor, Value, Weight
from ligerprof.roles import Role
from ligerprof.torch_memory import layer_norm as layer_norm_memory
from ligerprof.torch_memory import softmax
from ligerprof.torch_memory.dtypes import FP32_BYTES, Scratch
from ligerprof.torch_memory.libraries import GROUPED_MM_CAPABILITY
from ligerprof.torch_memory.low_bit import int8_product_bytes, int8_quantization_bytes, nf4_scale_bytes
from ligerprof.torch_memory.reductions import column_sum_scratch
from ligerprof.torch_memory.saved_tensors import ADDMM, BMM, MM, FactorShape


def linear(  # noqa: PLR0913 - what callers know of the product
    context: Context,
    value: Value,
    weight: Tensor,
    bias: Weight | None = None,
    *,
    rows: int | None = None,
    is_function: bool = True,
    role: Role = Role.ACTIVATIONS,
    gradient_role: Role = Role.ACTIVATIONS,
) -> Value:
    """`F.linear` or GPT-2's Conv1D: saves its input for the weight's gradient, autocast's weight for the input's.

    ZeRO-3 puts a function of its own in the place of `F.linear` (LinearFunctionForZeroStage3), which saves both always.

    Args:
        rows: of the input; None: one for each token.
        is_function: whether it is a call of `F.linear`, and not `@`.
    """
    rows = context.tokens if rows is None else rows
    read_weight = context.autocast_weight(weight)
    read = context.autocast(value)
    inputs: tuple[Tensor, ...] = (read_weight, read)
    factor = factor_of(value, weight, rows)
    elements = rows * factor[1]
    bias_sum: Scratch = ()
    if bias is not None:
        # addmm's gradients: the input's, then the weight's
        inputs = (read, read_weight, context.autocast_weight(bias))
        if bias.trainable:
            bias_sum = column_sum(context, elements, bias.elements, read.width)
    saves = ((read,) if weight.needs_gradient else ()) + ((read_weight,) if value.needs_gradient else ())
    is_conv1d = isinstance(weight, Weight) and weight.layer is not None and not context.spec.architecture.linear_layers
    by_zero = context.recipe.zero == 3 and is_function and not is_conv1d
    if by_zero:
        inputs, saves = (read, *(item for item in inputs if item is not read)), (read, read_weight)
    output = context.tape.run(
        Operation(
            elements=elements,
            width=read.width,
            inputs=inputs,
            saves=saves,
            role=role,
            gradient_role=gradient_role,
            reduction_scratch_bytes=() if by_zero else bias_sum,
            backward_scratch_bytes=bias_sum if by_zero else (),
            gradient_is_view=not by_zero,
            in_function=by_zero,
            is_product=True,
            operator=MM if by_zero else product_operator(bias),
            factor=factor,
        )
    )
    context.tape.release(read)
    if isinstance(read_weight, Value) and read_weight is not weight and not weight.trainable:
        context.tape.release(read_weight)
    return output


def factor_of(value: Value, weight: Tensor, rows: int) -> FactorShape:
    """Inputs and outputs of a linear layer's weight; GPT-2's Conv1D stores it the other way round."""
    inputs = value.elements // rows
    return inputs, weight.elements // inputs


def product_operator(bias: Weight | None) -> str:
    """The operator that `F.linear` runs."""
    return MM if bias is None else ADDMM


def column_sum(context: Context, elements: int, columns: int, width: int) -> Scratch:
    """The workspaces of a sum over all rows of `columns`."""
    return column_sum_scratch(elements // columns, columns, width, context.recipe.gpu_spec)


def linear_4bit(context: Context, value: Value, weight: Weight, bias: Weight | None) -> Value:
    """Linear4bit of bitsandbytes: computes in 16 bits, saves only the packed weight, and unpacks it in both passes.

    Unpacking makes the whole weight, and nested scales in fp32: twice in forward (`_dequant_linear_fallback`, which
    runs above some 1536 tokens; fewer may go without), once in backward (`MatMul4Bit.backward`).
    """
    tape, width = context.tape, context.compute_bytes
    read = context.cast(value, width)
    unpacked_bytes = weight.elements * width
    factor = factor_of(value, weight, context.tokens)
    scale_bytes = nf4_scale_bytes(weight.elements, nested=context.recipe.nested_quant)
    scales = (scale_bytes,) if scale_bytes else ()
    unscaled = tuple(-size_bytes for size_bytes in scales)
    product = tape.run(
        Operation(
            elements=context.tokens * factor[1],
            width=width,
            inputs=(read,) if bias is None else (read, bias),
            leading_scratch=(*scales, *scales, unpacked_bytes, *unscaled, *unscaled),
            leading_gradient_scratch=(*scales, unpacked_bytes, *unscaled),
            scratch_role=Role.WEIGHT_CASTS,
            is_product=True,
            in_function=True,
            operator=product_operator(bias),
            factor=factor,
        )
    )
    output = context.cast(product, value.width)
    tape.release(read, product)
    return output


def linear_8bit(context: Context, value: Value, weight: Weight, bias: Weight | None) -> Value:
    """Linear8bitLt of bitsandbytes with an input without outliers (autograd/_functions.py, MatMul8bitLt).

    The product takes any dtype of its input and returns it. It keeps the input as an attribute of its node, and makes
    the whole weight in that dtype in backward.
    """
    tape, inputs = context.tape, value.elements // context.tokens
    outputs = weight.elements // inputs
    casts = not context.is_float16(value)
    result_bytes = context.tokens * outputs * value.width
    product_bytes = int8_product_bytes(context.tokens, inputs, outputs, casts=casts)
    # the result does not exist yet while the input is quantized
    quantization_bytes = int8_quantization_bytes(context.tokens, inputs, casts=casts) - result_bytes
    return tape.run(
        Operation(
            elements=context.tokens * outputs,
            width=value.width,
            inputs=(value,) if bias is None else (value, bias),
            pins=(value,),
            forward_scratch_bytes=max(product_bytes, quantization_bytes),
            backward_scratch_bytes=weight.elements * value.width,
            is_product=True,
            in_function=True,
        )
    )


def add(context: Context, left: Value, right: Value, *, role: Role = Role.ACTIVATIONS) -> Value:
    """`left + right`: saves nothing; an operand of the result's dtype receives the gradient itself."""
    width = max(left.width, right.width)
    return context.tape.run(
        Operation(
            elements=left.elements,
            width=width,
            inputs=tuple(item for item in (left, right) if item.width != width),
            passes=tuple(item for item in (left, right) if item.width == width),
            role=role,
            gradient_role=left.gradient_role,
        )
    )


def add_columns(context: Context, value: Value, numbers: Tensor) -> Value:
    """`value + numbers` with a number for each column, whose gradient is summed over the rows."""
    width = max(value.width, numbers.width)
    same, sums = value.width == width, numbers.needs_gradient
    return context.tape.run(
        Operation(
            elements=value.elements,
            width=width,
            inputs=(numbers,) if same else (numbers, value),
            passes=(value,) if same else (),
            reduction_scratch_bytes=column_sum(context, value.elements, numbers.elements, width) if sums else (),
        )
    )


def scale(context: Context, value: Value, *, role: Role = Role.ACTIVATIONS) -> Value:
    """`value * number`: saves nothing."""
    return context.tape.run(
        Operation(
            elements=value.elements, width=value.width, inputs=(value,), role=role, gradient_role=value.gradient_role
        )
    )


def multiply(context: Context, left: Value, right: Value) -> Value:
    """`left * right` of two activations of one shape; autocast may have computed one of them in fp32."""
    if left.width != right.width:
        return multiply_wide(context, *sorted((left, right), key=lambda factor: factor.width))
    saves = saved_factors(left, right)
    # the second factor's gradient comes first
    return context.tape.run(Operation(elements=left.elements, width=left.width, inputs=(right, left), saves=saves))


def multiply_wide(context: Context, left: Value, right: Value) -> Value:
    """`left * right` where `right` may be wider: keeps both.

    Both gradients are made wide, then the left one is cast. The engine frees what the product saved after the cast;
    checkpointing's unpack hooks hand it over for good, so it is gone before.
    """
    tape = context.tape
    read = _read_wide(context, left, right.width)
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


def _read_wide(context: Context, value: Value, width: int, *, sums: bool = False) -> Value:
    """A factor of a wider product, whose gradient is cast last.

    Checkpointing frees what the product saved before that, and so do products whose other gradient is summed first.
    """
    if value.width == width or not (context.unpacks_once or sums):
        return context.tape.name(value)
    return context.tape.run(Operation(elements=value.elements, width=width, inputs=(value,), view_of=value))


def saved_factors(left: Value, right: Value) -> tuple[Value, ...]:
    """What a product saves: each factor whose counterpart needs a gradient (torch's derivatives.yaml)."""
    return tuple(kept for kept, other in ((right, left), (left, right)) if other.needs_gradient)


def in_order(context: Context, value: Value, *, copies: bool) -> Value:
    """`reshape` to one batch of matrices: a copy if heads lie between tokens."""
    if not copies:
        return context.tape.name(value)
    return context.tape.run(Operation(elements=value.elements, width=value.width, passes=(value,)))


def layer_norm(context: Context, value: Value, weights: Sequence[Tensor], columns: int) -> Value:
    """`native_layer_norm`: keeps its input, and mean and reciprocal deviation of each row in fp32.

    Autocast runs it in fp32 and lets its output stay so.

    Args:
        weights: weight and bias, or neither.
        columns: elements of a row.
    """
    read, rows = context.cast_for("layer_norm", value), value.elements // columns
    kept = tuple(item for item in weights if isinstance(item, Value))
    sums = any(item.needs_gradient for item in weights)
    output = context.tape.run(
        Operation(
            elements=value.elements,
            width=read.width,
            inputs=(read, *weights),
            saves=(read, *kept),
            extra_saved_bytes=layer_norm_memory.statistics_sizes(rows),
            # parameters
            other_saves=len(weights) - len(kept),
            backward_scratch_bytes=layer_norm_memory.backward_scratch(
                rows, columns, weights[0].width, context.recipe.gpu_spec
            )
            if sums
            else (),
        )
    )
    context.tape.release(read)
    return output


def turned(context: Context, value: Value) -> Value:
    """A view of all elements whose gradient is copied, for it comes in another order."""
    return context.tape.run(Operation(elements=value.elements, width=value.width, inputs=(value,), view_of=value))


def product_of_values(
    context: Context, left: Value, right: Value, elements: int, *, role: Role = Role.ACTIVATIONS
) -> Value:
    """A batch of matrix products of two values; the right gradient comes first."""
    return context.tape.run(
        Operation(
            elements=elements,
            width=left.width,
            inputs=(right, left),
            saves=saved_factors(left, right),
            role=role,
            gradient_role=role,
            gradient_is_view=True,
            operator=BMM,
        )
    )


def convolve(context: Context, value: Value, name: str) -> Value:
    """A convolution over the tokens of each channel, with as many zeros at both ends as its kernel looks back.

    Both passes copy the input, whose channels follow one another (aten/src/ATen/native/Convolution.cpp).
    """
    weight, bias = context.weights[f"{name}.weight"], context.weights.get(f"{name}.bias")
    read = context.autocast(value)
    # of a view of the weight, whose copy autocast does not keep
    factor = context.cast_weight(weight, read.width)
    rows = context.recipe.rows * (context.recipe.row_tokens + weight.shape[-1] - 1)
    copy = (read.size_bytes,) if context.recipe.row_tokens > 1 else ()
    output = context.tape.run(
        Operation(
            elements=rows * (value.elements // context.tokens),
            width=read.width,
            inputs=(read, factor) if bias is None else (read, factor, context.autocast_weight(bias)),
            # whatever the gradient is for
            saves=(read, factor),
            leading_scratch=copy,
            leading_gradient_scratch=copy,
        )
    )
    context.tape.release(read)
    if isinstance(factor, Value):
        context.tape.release(factor)
    return output


def batch_product(context: Context, value: Value, weight: Weight) -> Value:
    """`torch.bmm(value, weight)` with a weight of several matrices, (in, out)."""
    factor, read = context.autocast_weight(weight), context.autocast(value)
    _, inputs, outputs = weight.shape
    product = context.tape.run(
        Operation(
            elements=value.elements // inputs * outputs,
            width=read.width,
            inputs=(factor, read),
            saves=((read,) if weight.trainable else ()) + ((factor,) if value.needs_gradient else ()),
            is_product=True,
            operator=BMM,
        )
    )
    context.tape.release(read)
    if isinstance(factor, Value) and not weight.trainable:
        context.tape.release(factor)
    return product


def grouped_product(context: Context, value: Value, weight: Weight) -> Value:
    """`grouped_mm(value.to(weight.dtype), weight)`: saves both; autocast leaves it alone.

    On a GPU without it, a function of transformers saves both even if they are frozen, and makes both gradients
    (`_grouped_mm_fallback` in integrations/moe.py).
    """
    inputs = value.elements // (context.tokens * context.spec.chosen_experts)
    outputs = weight.elements // (weight.shape[0] * inputs)
    read = context.cast(value, weight.width)
    saves = ((read,) if weight.trainable else ()) + ((weight,) if value.needs_gradient else ())
    falls_back = context.recipe.gpu_spec.compute_capability < GROUPED_MM_CAPABILITY
    unused_bytes = sum(item.size_bytes for item in (read, weight) if not item.needs_gradient)
    product = context.tape.run(
        Operation(
            elements=value.elements // inputs * outputs,
            width=weight.width,
            inputs=(read, weight),
            saves=(read, weight) if falls_back else saves,
            backward_scratch_bytes=unused_bytes if falls_back else 0,
            gradient_is_view=not falls_back,
            in_function=falls_back,
            is_product=falls_back or weight.width == FP32_BYTES,
        )
    )
    context.tape.release(read)
    return product


def soften(
    context: Context, value: Value, width: int | None, *, scratch: Scratch = (), role: Role = Role.ACTIVATIONS
) -> Value:
    """`softmax` with a result of `width` bytes per element, or of autocast's choice: keeps its output."""
    width = width or context.result_width("softmax.int", value)
    dtype, result = ("float32" if size == FP32_BYTES else context.recipe.compute_dtype for size in (value.width, width))
    read = context.cast(value, width) if softmax.casts_first(dtype, result) else context.tape.name(value)
    soft = context.tape.run(
        Operation(
            elements=read.elements,
            width=width,
            inputs=(read,),
            saves_output=True,
            forward_scratch_bytes=scratch,
            backward_scratch_bytes=softmax.backward_scratch(read.elements, result, result),
            role=role,
            gradient_role=role,
        )
    )
    context.tape.release(read)
    return soft


def unary(context: Context, value: Tensor, *, saves_output: bool = False, role: Role = Role.ACTIVATIONS) -> Value:
    """An elementwise function: saves its input, or its output if the gradient is computed from that (tanh)."""
    saves = () if saves_output else (value,)
    return context.tape.run(
        Operation(
            elements=value.elements,
            width=value.width,
            inputs=(value,),
            saves=saves,
            saves_output=saves_output,
            role=role,
            gradient_role=value.gradient_role if isinstance(value, Value) else Role.ACTIVATIONS,
        )
    )


def dropout(context: Context, value: Value, probability: float) -> Value:
    """`native_dropout`: saves a mask of one byte per element; with probability 0 torch returns the input."""
    if probability == 0:
        return context.tape.name(value)
    return context.tape.run(
        Operation(
            elements=value.elements,
            width=value.width,
            inputs=(value,),
            extra_saved_bytes=value.elements,
            saves_first=True,
        )
    )


def square(context: Context, value: Value) -> Value:
    """`value.pow(2)`: its gradient computes value ** 1, times two, times the incoming gradient."""
    return context.tape.run(
        Operation(
            elements=value.elements,
            width=value.width,
            inputs=(value,),
            saves=(value,),
            leading_gradient_scratch=(value.size_bytes, value.size_bytes),
        )
    )


def row_root(context: Context, squares: Value, rows: int) -> Value:
    """`torch.rsqrt(squares.mean(-1) + eps)`: one number per row; saves its result. It takes over `squares`."""
    tape = context.tape
    mean = tape.run(Operation(elements=rows, width=FP32_BYTES, inputs=(squares,)))
    tape.release(squares)
    shifted = tape.run(Operation(elements=rows, width=FP32_BYTES, passes=(mean,)))
    root = unary(context, shifted, saves_output=True)
    tape.release(mean, shifted)
    return root


def scale_rows(context: Context, value: Value, factors: Tensor) -> Value:
    """`value * factors` with one factor per row, which may be wider: saves both, if both need gradients.

    The gradients are made and cast as those of `multiply_wide`.
    """
    width = max(value.width, factors.width)
    if not factors.needs_gradient:
        operation = Operation(elements=value.elements, width=width, inputs=(value,), saves=(factors,))
        return context.tape.run(operation)
    read = _read_wide(context, value, width)
    wide_bytes = value.elements * width
    output = context.tape.run(
        Operation(
            elements=value.elements,
            width=width,
            inputs=(read, factors),
            saves=(read, factors),
            # gradient times value, before it is summed over the row, and the gradient of the value before it is cast
            unreduced_bytes=wide_bytes,
            sums_first=True,
            backward_scratch_bytes=wide_bytes if read.width != width else 0,
        )
    )
    context.tape.release(read)
    return output


def scale_columns(context: Context, value: Value, weight: Tensor) -> Value:
    """`weight * value` with one weight per column: saves both."""
    width = max(value.width, weight.width)
    read = _read_wide(context, value, width, sums=True)
    saves: tuple[Tensor, ...] = (value, weight) if weight.needs_gradient else (weight,)
    # gradient times value, before it is summed over the tokens
    product_bytes = value.elements * width if weight.needs_gradient else 0
    scratch = column_sum(context, value.elements, weight.elements, width) if weight.needs_gradient else ()
    output = context.tape.run(
        Operation(
            elements=value.elements,
            width=width,
            inputs=(read, weight),
            saves=saves,
            unreduced_bytes=product_bytes,
            reduction_scratch_bytes=scratch,
        )
    )
    context.tape.release(read)
    return output


def renamed(context: Context, old: Value, new: Value) -> Value:
    """`x = f(x)`: the variable drops the old tensor."""
    context.tape.release(old)
    return new
