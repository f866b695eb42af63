"""Norms: by their tapes, or as one fused kernel."""

from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.kernel_call import call_kernel, kernel_memory
from ligerprof.analyzers.estimate.operators import Replay
from ligerprof.analyzers.estimate.tensors import Tensor, Value
from ligerprof.kernels.selection import find_slot
from ligerprof.models.architecture import NormForm
from ligerprof.models.layer_tape import function_tape, norm_tape


def norm(context: Context, value: Value, name: str) -> Value:
    """The norm whose weight is `{name}.weight`, over vectors as wide as that weight."""
    form = context.spec.architecture.norm.form
    slot = None if form.feature is None else find_slot(form.feature).name
    if slot is not None and context.is_fused(slot, name):
        return _fused_norm(context, value, name, slot)
    if not form.has_weight:
        return Replay(context, value, columns=context.spec.hidden_size).run(norm_tape(context.spec))
    weight = context.weights[f"{name}.weight"]
    context.hooks.before_module(weight)
    as_reference = slot is not None and form is NormForm.RMS and slot in context.kernels and not context.is_fused(slot)
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
