"""The memory of the LayerNorm kernel."""

from ligerprof.kernels.device import never_unavailable, triton_unavailable_reason
from ligerprof.kernels.rows.plan import backward_programs
from ligerprof.kernels.selection import applies
from ligerprof.kernels.spec import KernelMemory, KernelShape, KernelSpec
from ligerprof.torch_memory.dtypes import FP32_BYTES

_REFERENCE = "ligerprof.kernels.layernorm.reference:layer_norm"


def _memory(shape: KernelShape) -> KernelMemory:
    """The input is kept, and two fp32 a row; backward holds two rows of sums for each of its programs."""
    plane_bytes = shape.tokens * shape.hidden * shape.activation_bytes
    parameters_bytes = 2 * shape.hidden * shape.parameter_bytes if shape.head_trainable else 0
    programs = backward_programs(rows=shape.tokens, columns=shape.hidden, sm_count=shape.sm_count)
    return KernelMemory(
        kept_inputs=("x", "weight", "bias"),
        output_bytes=plane_bytes,
        saved_bytes=2 * shape.tokens * FP32_BYTES,
        backward_gradient_bytes=plane_bytes + parameters_bytes,
        backward_temporary_bytes=2 * programs * shape.hidden * FP32_BYTES if shape.head_trainable else 0,
    )


SPECS = (
    KernelSpec(
        name="layernorm",
        provider="ligerprof",
        title="LayerNorm, one rounding, backward in one pass",
        entry="ligerprof.kernels.layernorm.triton:layer_norm",
        reference=_REFERENCE,
        slot="layernorm",
        memory=_memory,
        applies=applies("layernorm"),
        unavailable_reason=triton_unavailable_reason,
    ),
    KernelSpec(
        name="layernorm",
        provider="torch",
        title="LayerNorm of torch",
        entry=_REFERENCE,
        reference=_REFERENCE,
        slot="layernorm",
        memory=None,
        applies=applies("layernorm"),
        unavailable_reason=never_unavailable,
    ),
)
