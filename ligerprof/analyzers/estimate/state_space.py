"""A Mamba-2 mixer on the tape, as transformers 5.23 computes it without `mamba_ssm` and `causal_conv1d`."""

from ligerprof.analyzers.estimate.activations import activate
from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.delta_net import Project, convolved, without_padding
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.operations import (
    multiply,
    multiply_wide,
    renamed,
    row_root,
    scale,
    scale_columns,
    scale_rows,
    square,
    unary,
)
from ligerprof.analyzers.estimate.state_scan import scan_states
from ligerprof.analyzers.estimate.tensors import Value
from ligerprof.models.mixers import StateSpaceSizes
from ligerprof.torch_memory.dtypes import DTYPE_BYTES, FP32_BYTES


def mix_states(context: Context, value: Value, layer: str, project: Project) -> Value:
    """`FalconH1Mixer` or `BambaMixer` on the normed input of a layer, which the caller still holds."""
    tape, row, sizes = context.tape, context.spec.architecture.state_space, context.spec.state_space
    assert row is not None
    assert sizes is not None
    name, tokens = f"{layer}.{row.name}", context.tokens
    read = without_padding(context, value)
    if row.scales_parts:
        read = renamed(context, read, scale(context, read))
    joint = project(context, read, f"{name}.in_proj")
    if row.scales_parts:
        joint = renamed(context, joint, _times_constants(context, joint))
    rates = _rates(context, name)
    gate, mixed, steps = tape.split(joint, (tokens * sizes.inner, tokens * sizes.convolved, tokens * sizes.heads))
    bent = convolved(context, mixed, f"{name}.conv1d")
    bent = renamed(context, bent, activate(context, bent, context.spec.activation))
    mixed = renamed(context, mixed, context.cast(bent, mixed.width))
    tape.release(bent)
    mixed = renamed(context, mixed, without_padding(context, mixed))
    values, into, out_of = tape.split(mixed, (tokens * sizes.inner, tokens * sizes.states, tokens * sizes.states))
    tape.release(read)
    scanned = scan_states(context, sizes, (values, into, out_of), steps, rates, name)
    if row.norm is None:
        opened = unary(context, gate)
        product = multiply_wide(context, opened, scanned)
        tape.release(opened)
        scanned = renamed(context, scanned, product)
    else:
        scanned = renamed(context, scanned, _gated_norm(context, scanned, gate, f"{name}.{row.norm}", sizes))
    narrow = context.cast(scanned, context.stream_bytes)
    output = project(context, narrow, f"{name}.out_proj")
    tape.release(narrow, scanned, values, into, out_of, mixed, rates, gate, steps, joint)
    return output


def _times_constants(context: Context, value: Value) -> Value:
    """Times a constant per column in the dtype of the model, which may be wider: FSDP2 does not cast buffers."""
    width = max(value.width, DTYPE_BYTES[context.recipe.weight_dtype])
    return context.tape.run(
        Operation(
            elements=value.elements,
            width=width,
            inputs=(value,),
            # the gradient is computed in the wider dtype, and cast
            backward_scratch_bytes=value.elements * width if width != value.width else 0,
        )
    )


def _rates(context: Context, name: str) -> Value:
    """`-A_log.float().exp()`."""
    weight = context.weights[f"{name}.A_log"]
    wide = context.cast_weight(weight, FP32_BYTES)
    raised = context.tape.run(Operation(elements=weight.elements, width=FP32_BYTES, inputs=(wide,), saves_output=True))
    if isinstance(wide, Value):
        context.tape.release(wide)
    negated = context.tape.run(Operation(elements=weight.elements, width=FP32_BYTES, inputs=(raised,)))
    return renamed(context, raised, negated)


def _gated_norm(context: Context, value: Value, gate: Value, name: str, sizes: StateSpaceSizes) -> Value:
    """`BambaRMSNormGated`: the norm of each group of `value` times the activated gate, in fp32."""
    tape, weight = context.tape, context.weights[f"{name}.weight"]
    wide = context.cast(gate, FP32_BYTES)
    bent = renamed(context, wide, unary(context, wide))
    product = multiply(context, value, bent)
    tape.release(bent)
    squares = square(context, product)
    root = row_root(context, squares, context.tokens * sizes.groups)
    scaled = renamed(context, product, scale_rows(context, product, root))
    weighted = scale_columns(context, scaled, weight)
    tape.release(scaled, root)
    return weighted
