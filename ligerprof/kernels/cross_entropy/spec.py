"""What the cross-entropy kernel and its plain-torch twin cost."""

from ligerprof.kernels.device import never_unavailable, triton_unavailable_reason
from ligerprof.kernels.selection import applies
from ligerprof.kernels.spec import KernelMemory, KernelShape, KernelSpec
from ligerprof.torch_memory.dtypes import FP32_BYTES, INDEX_BYTES

_REFERENCE = "ligerprof.kernels.cross_entropy.reference:cross_entropy"


def _memory(shape: KernelShape) -> KernelMemory:
    """The gradient takes the logits' place; beside it stand the tokens' losses and one factor."""
    return KernelMemory(
        kept_inputs=("logits",),
        output_bytes=FP32_BYTES,
        saved_bytes=FP32_BYTES,
        forward_temporary_bytes=shape.tokens * FP32_BYTES,
    )


def reference_memory(shape: KernelShape) -> KernelMemory:
    """Plain torch: log-probabilities are kept; backward holds their gradient and the fp32 logits' beside them."""
    plane_elements = shape.tokens * shape.vocab
    plane_bytes = plane_elements * FP32_BYTES
    upcast = shape.product_bytes != FP32_BYTES
    gradient_bytes = plane_elements * shape.product_bytes
    # labels padded by one a sequence, then a contiguous copy of all but the first; of one sequence the copy is a view
    padded_bytes = (shape.tokens + shape.sequences) * INDEX_BYTES
    single = shape.sequences == 1
    # beside the loss itself, the number of labels that count
    kept_labels_bytes = padded_bytes if single else shape.tokens * INDEX_BYTES
    return KernelMemory(
        output_bytes=FP32_BYTES,
        saved_bytes=plane_bytes + kept_labels_bytes + FP32_BYTES,
        forward_temporary_bytes=plane_bytes if upcast else 0,
        backward_gradient_bytes=gradient_bytes,
        # the labels and their number go before the second plane comes
        backward_temporary_bytes=2 * plane_bytes - gradient_bytes - kept_labels_bytes - FP32_BYTES,
    )


SPECS = (
    KernelSpec(
        name="ce",
        provider="ligerprof",
        title="cross-entropy that writes the gradient over the logits",
        entry="ligerprof.kernels.cross_entropy.triton:cross_entropy",
        reference=_REFERENCE,
        slot="ce",
        memory=_memory,
        applies=applies("ce"),
        unavailable_reason=triton_unavailable_reason,
    ),
    KernelSpec(
        name="ce",
        provider="torch",
        title="cross-entropy in plain torch, upcast to fp32",
        entry=_REFERENCE,
        reference=_REFERENCE,
        slot="ce",
        memory=reference_memory,
        applies=applies("ce"),
        unavailable_reason=never_unavailable,
    ),
)
