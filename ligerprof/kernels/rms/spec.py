"""The memory of the RMSNorm kernels."""

from collections.abc import Callable
from dataclasses import replace

from ligerprof.kernels.device import never_unavailable, triton_unavailable_reason
from ligerprof.kernels.rows.plan import backward_programs
from ligerprof.kernels.selection import applies
from ligerprof.kernels.spec import KernelMemory, KernelShape, KernelSpec
from ligerprof.torch_memory.dtypes import FP32_BYTES

_REFERENCE = "ligerprof.kernels.rms.reference:rms_norm"


def _memory(shape: KernelShape) -> KernelMemory:
    """The input is kept, and one fp32 a row; backward holds a row of sums for each of its programs."""
    plane_bytes = shape.tokens * shape.hidden * shape.activation_bytes
    programs = backward_programs(rows=shape.tokens, columns=shape.hidden, sm_count=shape.sm_count)
    weight_gradient_bytes = shape.hidden * shape.parameter_bytes if shape.head_trainable else 0
    return KernelMemory(
        kept_inputs=("x", "weight"),
        output_bytes=plane_bytes,
        saved_bytes=shape.tokens * FP32_BYTES,
        backward_gradient_bytes=plane_bytes + weight_gradient_bytes,
        backward_temporary_bytes=programs * shape.hidden * FP32_BYTES if shape.head_trainable else 0,
    )


def _add_memory(shape: KernelShape) -> KernelMemory:
    """Its own sum is kept and returned; one gradient serves both addends, and where autocast computed one, a cast twin.

    `activation_bytes` is the residual stream's; the other addend has the dtype of matrix products.
    """
    alone = _memory(shape)
    elements = shape.tokens * shape.hidden
    twin_bytes = elements * shape.product_bytes if shape.product_bytes != shape.activation_bytes else 0
    return replace(
        alone,
        kept_inputs=("weight",),
        keeps_output=True,
        output_bytes=2 * alone.output_bytes,
        backward_gradient_bytes=alone.backward_gradient_bytes + twin_bytes,
    )


def _ours(name: str, title: str, function: str, memory: Callable[[KernelShape], KernelMemory]) -> KernelSpec:
    return KernelSpec(
        name=name,
        provider="ligerprof",
        title=title,
        entry=f"ligerprof.kernels.rms.triton:{function}",
        reference=f"ligerprof.kernels.rms.reference:{function}",
        slot="rms",
        memory=memory,
        applies=applies("rms"),
        unavailable_reason=triton_unavailable_reason,
    )


SPECS = (
    _ours("rms", "RMSNorm, one rounding, backward in one pass", "rms_norm", _memory),
    _ours("add_rms", "residual addition and RMSNorm in one pass each way", "add_rms_norm", _add_memory),
    KernelSpec(
        name="rms",
        provider="torch",
        title="RMSNorm in plain torch, upcast to fp32",
        entry=_REFERENCE,
        reference=_REFERENCE,
        slot="rms",
        memory=None,
        applies=applies("rms"),
        unavailable_reason=never_unavailable,
    ),
)
