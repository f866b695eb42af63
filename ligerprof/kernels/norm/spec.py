"""The memory cost of the norm kernels."""

from dataclasses import replace

from ligerprof.kernels.norm.plan import backward_programs
from ligerprof.kernels.spec import KernelMemory, KernelShape, plain_torch, triton_kernel
from ligerprof.torch_memory.dtypes import FP32_BYTES


def _rms_memory(shape: KernelShape) -> KernelMemory:
    return _memory(shape, parameters=("weight",), statistics=1)


def _layernorm_memory(shape: KernelShape) -> KernelMemory:
    return _memory(shape, parameters=("weight", "bias"), statistics=2)


def _memory(shape: KernelShape, *, parameters: tuple[str, ...], statistics: int) -> KernelMemory:
    """Keeps the input and `statistics` fp32 values per row; each program of backward sums the parameters' gradients."""
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
    """Keeps and returns the sum; both addends share one gradient, cast once if autocast made their dtypes differ.

    `activation_bytes` describes the residual stream; the other addend has the dtype of matrix products.
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


_RMS = triton_kernel("rms", "RMSNorm, one rounding, backward in one pass", "norm:rms_norm", _rms_memory)
_LAYERNORM = triton_kernel(
    "layernorm", "LayerNorm, one rounding, backward in one pass", "norm:layer_norm", _layernorm_memory
)
SPECS = (
    _RMS,
    triton_kernel(
        "rms",
        "residual addition and RMSNorm in one pass each way",
        "norm:add_rms_norm",
        _add_rms_memory,
        name="add_rms",
    ),
    plain_torch(_RMS, "RMSNorm in plain torch, upcast to fp32"),
    _LAYERNORM,
    plain_torch(_LAYERNORM, "LayerNorm of torch"),
)
