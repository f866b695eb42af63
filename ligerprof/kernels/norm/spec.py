"""The memory cost of the norm kernels."""

from collections.abc import Callable
from dataclasses import replace

from ligerprof.kernels.device import never_unavailable, triton_unavailable_reason
from ligerprof.kernels.norm.plan import backward_programs
from ligerprof.kernels.selection import applies
from ligerprof.kernels.spec import KernelMemory, KernelShape, KernelSpec
from ligerprof.torch_memory.dtypes import FP32_BYTES

_FOLDER = "ligerprof.kernels.norm"


def _rms_memory(shape: KernelShape) -> KernelMemory:
    """Keeps the input and rstd."""
    return _memory(shape, parameters=("weight",), statistics=1)


def _layernorm_memory(shape: KernelShape) -> KernelMemory:
    """Keeps the input, mean and rstd."""
    return _memory(shape, parameters=("weight", "bias"), statistics=2)


def _memory(shape: KernelShape, *, parameters: tuple[str, ...], statistics: int) -> KernelMemory:
    """Keeps the input, and `statistics` fp32 values per row; each program of backward sums the parameters' gradients.

    Args:
        parameters: names of the parameters, all of which want a gradient if one does.
    """
    output_bytes = shape.tokens * shape.hidden * shape.activation_bytes
    programs = backward_programs(rows=shape.tokens, columns=shape.hidden, sm_count=shape.sm_count)
    elements = len(parameters) * shape.hidden if shape.weight_requires_grad else 0
    return KernelMemory(
        kept_inputs=("x", *parameters),
        output_bytes=output_bytes,
        saved_bytes=statistics * shape.tokens * FP32_BYTES,
        backward_gradient_bytes=output_bytes + elements * shape.parameter_bytes,
        backward_temporary_bytes=programs * elements * FP32_BYTES,
    )


def _add_rms_memory(shape: KernelShape) -> KernelMemory:
    """Keeps and returns the sum; both addends share one gradient, cast once where autocast made their dtypes differ.

    `activation_bytes` is the residual stream's; the other addend has the dtype of matrix products.
    """
    alone = _rms_memory(shape)
    elements = shape.tokens * shape.hidden
    cast_bytes = elements * shape.product_bytes if shape.product_bytes != shape.activation_bytes else 0
    return replace(
        alone,
        kept_inputs=("weight",),
        keeps_output=True,
        output_bytes=2 * alone.output_bytes,
        backward_gradient_bytes=alone.backward_gradient_bytes + cast_bytes,
    )


def _kernel(
    name: str, slot: str, title: str, function: str, memory: Callable[[KernelShape], KernelMemory]
) -> KernelSpec:
    return KernelSpec(
        name=name,
        provider="ligerprof",
        title=title,
        entry=f"{_FOLDER}.triton:{function}",
        reference=f"{_FOLDER}.reference:{function}",
        slot=slot,
        memory=memory,
        applies=applies(slot),
        unavailable_reason=triton_unavailable_reason,
    )


def _reference(kernel: KernelSpec, title: str) -> KernelSpec:
    return replace(
        kernel,
        provider="torch",
        title=title,
        entry=kernel.reference,
        memory=None,
        unavailable_reason=never_unavailable,
    )


_RMS = _kernel("rms", "rms", "RMSNorm, one rounding, backward in one pass", "rms_norm", _rms_memory)
_ADD_RMS = _kernel(
    "add_rms", "rms", "residual addition and RMSNorm in one pass each way", "add_rms_norm", _add_rms_memory
)
_LAYERNORM = _kernel(
    "layernorm", "layernorm", "LayerNorm, one rounding, backward in one pass", "layer_norm", _layernorm_memory
)
SPECS = (
    _RMS,
    _ADD_RMS,
    _reference(_RMS, "RMSNorm in plain torch, upcast to fp32"),
    _LAYERNORM,
    _reference(_LAYERNORM, "LayerNorm of torch"),
)
