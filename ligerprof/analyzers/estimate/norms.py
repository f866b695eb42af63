"""Norms, as transformers' plain torch code or as one fused kernel."""

from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.kernel_call import call_kernel, kernel_memory
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.operations import renamed, row_root, scale_columns, scale_rows, square
from ligerprof.analyzers.estimate.tensors import Tensor, Value, Weight
from ligerprof.kernels.slots import find_slot
from ligerprof.models.architecture import NormForm
from ligerprof.torch_memory.dtypes import FP32_BYTES
from ligerprof.torch_memory.layer_norm import backward_scratch, statistics_bytes


def norm(context: Context, value: Value, name: str) -> Value:
    """The norm whose weight is `{name}.weight`, over vectors as wide as that weight."""
    form = context.spec.architecture.norm.form
    slot = None if form.feature is None else find_slot(form.feature).name
    if slot is not None and context.is_fused(slot, name):
        return _fused_norm(context, value, name, slot)
    match form:
        case NormForm.LAYER:
            return _layer_norm(context, value, context.weights[f"{name}.weight"], context.weights[f"{name}.bias"])
        case NormForm.LAYER_PLUS_ONE:
            return _layer_norm_plus_one(context, value, name)
        case NormForm.LAYER_BARE:
            return _bare_layer_norm(context, value)
        case NormForm.CENTERED:
            return _centered_norm(context, value, context.weights[f"{name}.weight"])
    as_reference = slot is not None and slot in context.kernels and not context.is_fused(slot)
    return _rms_norm(context, value, context.weights[f"{name}.weight"], as_reference=as_reference)


def _fused_norm(context: Context, value: Value, name: str, slot: str) -> Value:
    weight = context.weights[f"{name}.weight"]
    inputs: dict[str, Tensor] = {"x": value, "weight": weight}
    if (bias := context.weights.get(f"{name}.bias")) is not None:
        inputs["bias"] = bias
    memory = kernel_memory(context, slot, value, weight)
    return call_kernel(context, memory, inputs, elements=value.elements, width=value.width)


def _rms_norm(context: Context, value: Value, weight: Weight, *, as_reference: bool) -> Value:
    """LlamaRMSNorm.forward: upcast, divide by the root, cast back, times the weight; Gemma's casts back last.

    Gemma multiplies by one plus the weight, in fp32, and so does kernels/rms/reference.py, for any offset.
    """
    tape, form = context.tape, context.spec.architecture.norm
    wide = context.cast(value, FP32_BYTES)
    squares = square(context, wide)
    root = row_root(context, squares, value.elements // weight.elements)
    scaled = scale_rows(context, wide, root)
    tape.release(root, wide)
    if not (form.casts_last or as_reference):
        narrow = context.cast(scaled, value.width)
        output = scale_columns(context, narrow, weight)
        tape.release(narrow, scaled)
        return output
    factor = _one_plus(context, weight) if form.offset or as_reference else weight
    product = scale_columns(context, scaled, factor)
    tape.release(scaled)
    if isinstance(factor, Value):
        tape.release(factor)
    return renamed(context, product, context.cast(product, value.width))


def bare_rms_norm(context: Context, value: Value, columns: int) -> Value:
    """Llama4TextL2Norm.forward: in fp32, without a weight, and cast back."""
    tape = context.tape
    wide = context.cast(value, FP32_BYTES)
    squares = square(context, wide)
    root = row_root(context, squares, value.elements // columns)
    scaled = scale_rows(context, wide, root)
    tape.release(root, wide)
    return renamed(context, scaled, context.cast(scaled, value.width))


def _one_plus(context: Context, weight: Weight) -> Value:
    """`1.0 + weight.float()`: as large as one row."""
    upcast = weight.width != FP32_BYTES
    return context.tape.run(
        Operation(
            elements=weight.elements,
            width=FP32_BYTES,
            inputs=(weight,) if upcast else (),
            passes=() if upcast else (weight,),
        )
    )


def _centered_norm(context: Context, value: Value, weight: Weight) -> Value:
    """CohereLayerNorm.forward: the mean is subtracted twice, and the fp32 weight multiplies before the cast."""
    tape, rows = context.tape, value.elements // weight.shape[-1]
    wide = context.cast(value, FP32_BYTES)
    mean = tape.run(Operation(elements=rows, width=FP32_BYTES, inputs=(wide,)))
    distance = _subtract_rows(context, wide, mean)
    squares = square(context, distance)
    tape.release(distance)
    root = row_root(context, squares, rows)
    distance = _subtract_rows(context, wide, mean)
    scaled = renamed(context, wide, scale_rows(context, distance, root))
    tape.release(distance, root)
    upcast = context.cast_weight(weight, FP32_BYTES)
    product = renamed(context, scaled, scale_columns(context, scaled, upcast))
    if isinstance(upcast, Value):
        tape.release(upcast)
    output = context.cast(product, value.width)
    tape.release(product, mean)
    return output


def _subtract_rows(context: Context, value: Value, mean: Value) -> Value:
    """`value - mean` with one mean per row."""
    return context.tape.run(Operation(elements=value.elements, width=value.width, inputs=(mean,), passes=(value,)))


def _bare_layer_norm(context: Context, value: Value) -> Value:
    """OlmoLayerNorm.forward: `layer_norm` in fp32 without weights, cast back."""
    wide = context.cast(value, FP32_BYTES)
    rows = value.elements // context.spec.hidden_size
    normed = context.tape.run(
        Operation(
            elements=wide.elements,
            width=FP32_BYTES,
            inputs=(wide,),
            saves=(wide,),
            extra_saved_bytes=statistics_bytes(rows),
            other_saves=1,
        )
    )
    output = context.cast(normed, value.width)
    context.tape.release(wide, normed)
    return output


def _layer_norm_plus_one(context: Context, value: Value, name: str) -> Value:
    """NemotronLayerNorm1P.forward: adds one to the weight, casts all to autocast's dtype, and norms outside of it."""
    tape, weight, bias = context.tape, context.weights[f"{name}.weight"], context.weights[f"{name}.bias"]
    shifted = tape.run(Operation(elements=weight.elements, width=weight.width, passes=(weight,)))
    width = context.half_bytes or value.width
    read, factor = context.cast(value, width), context.cast(shifted, width)
    added = context.cast_weight(bias, width)
    scratch = backward_scratch(context.tokens, weight.elements, width, context.recipe.gpu_spec)
    output = tape.run(
        Operation(
            elements=value.elements,
            width=width,
            inputs=(read, factor, added),
            saves=(read, factor),
            extra_saved_bytes=statistics_bytes(context.tokens),
            other_saves=2,
            backward_scratch_bytes=scratch if weight.trainable else (),
        )
    )
    tape.release(read, factor, shifted)
    if isinstance(added, Value):
        tape.release(added)
    return output


def _layer_norm(context: Context, value: Value, weight: Weight, bias: Weight) -> Value:
    """`native_layer_norm`: keeps its input, and mean and reciprocal deviation of each row in fp32.

    Autocast runs it in fp32 and lets its output stay so.
    """
    tape = context.tape
    read = context.cast_for("layer_norm", value)
    gpu = context.recipe.gpu_spec
    scratch = backward_scratch(context.tokens, weight.elements, weight.width, gpu) if weight.trainable else ()
    output = tape.run(
        Operation(
            elements=value.elements,
            width=read.width,
            inputs=(read, weight, bias),
            saves=(read,),
            extra_saved_bytes=statistics_bytes(context.tokens),
            # weight, bias and the second statistic
            other_saves=3,
            backward_scratch_bytes=scratch,
        )
    )
    tape.release(read)
    return output
