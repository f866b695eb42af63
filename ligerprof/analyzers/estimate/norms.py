"""Norms: by their tapes, by torch's `layer_norm`, or as one fused kernel."""

from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.kernel_call import call_kernel, kernel_memory
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.operators import Replay
from ligerprof.analyzers.estimate.tensors import Tensor, Value, Weight
from ligerprof.kernels.selection import find_slot
from ligerprof.models.architecture import NormForm
from ligerprof.models.layer_tape import function_tape, norm_tape
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
    weight = context.weights[f"{name}.weight"]
    context.hooks.before_module(weight)
    as_reference = slot is not None and slot in context.kernels and not context.is_fused(slot)
    tape = function_tape("rms_norm") if as_reference else norm_tape(context.spec)
    columns = weight.shape[-1] if weight.shape else weight.elements
    return Replay(context, value, name, columns=columns).run(tape)


def bare_norm(context: Context, value: Value) -> Value:
    """The norm of each head without a weight."""
    return Replay(context, value, columns=context.spec.head_dim).run(norm_tape(context.spec, bare=True))


def _fused_norm(context: Context, value: Value, name: str, slot: str) -> Value:
    weight = context.weights[f"{name}.weight"]
    inputs: dict[str, Tensor] = {"x": value, "weight": weight}
    if (bias := context.weights.get(f"{name}.bias")) is not None:
        inputs["bias"] = bias
    memory = kernel_memory(context, slot, value, weight)
    return call_kernel(context, memory, inputs, elements=value.elements, width=value.width)


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
