"""What the rotary embedding kernel and its plain-torch twin cost."""

from dataclasses import replace

from ligerprof.kernels.device import never_unavailable, triton_unavailable_reason
from ligerprof.kernels.selection import applies
from ligerprof.kernels.spec import KernelMemory, KernelShape, KernelSpec

_REFERENCE = "ligerprof.kernels.rope.reference:apply_rope"


def _memory(shape: KernelShape) -> KernelMemory:
    """Only the angles are kept; `parameter_bytes` is theirs. Forward rotates in place; gradients are made anew."""
    both_bytes = (_query_elements(shape) + _key_elements(shape)) * shape.activation_bytes
    return KernelMemory(kept_inputs=("cos", "sin"), backward_gradient_bytes=both_bytes)


def _query_elements(shape: KernelShape) -> int:
    return shape.tokens * shape.heads * shape.head_dim


def _key_elements(shape: KernelShape) -> int:
    return shape.tokens * shape.kv_heads * shape.head_dim


def _reference_memory(shape: KernelShape) -> KernelMemory:
    """Plain torch holds three planes at a time in the wider of the two dtypes; backward takes the keys first."""
    fused = _memory(shape)
    both_bytes = fused.backward_gradient_bytes
    queries, keys = _query_elements(shape), _key_elements(shape)
    wide_bytes = max(shape.activation_bytes, shape.parameter_bytes)
    forward_peak_bytes = max(3 * wide_bytes * queries, shape.activation_bytes * queries + 3 * wide_bytes * keys)
    backward_peak_bytes = shape.activation_bytes * keys + 3 * wide_bytes * queries
    return replace(
        fused,
        output_bytes=both_bytes,
        forward_temporary_bytes=forward_peak_bytes - both_bytes,
        backward_temporary_bytes=backward_peak_bytes - both_bytes,
    )


SPECS = (
    KernelSpec(
        name="rope",
        provider="ligerprof",
        title="rotary embedding of queries and keys in one launch, in place",
        entry="ligerprof.kernels.rope.triton:apply_rope_in_place",
        reference=_REFERENCE,
        slot="rope",
        memory=_memory,
        applies=applies("rope"),
        unavailable_reason=triton_unavailable_reason,
    ),
    KernelSpec(
        name="rope",
        provider="torch",
        title="rotary embedding in plain torch",
        entry=_REFERENCE,
        reference=_REFERENCE,
        slot="rope",
        memory=_reference_memory,
        applies=applies("rope"),
        unavailable_reason=never_unavailable,
    ),
)
