"""The memory of the cross-entropy kernel."""

from ligerprof.kernels.cross_entropy.results import result_bytes
from ligerprof.kernels.spec import KernelMemory, KernelShape, plain_torch, triton_kernel


def _memory(shape: KernelShape) -> KernelMemory:
    """The gradient overwrites the logits; new are the results, the tokens' losses and a factor, which fp16 keeps."""
    results = result_bytes(shape)
    return KernelMemory(
        kept_inputs=("logits",),
        output_bytes=results.output_bytes,
        forward_temporary_bytes=results.temporary_bytes,
        backward_temporary_bytes=results.backward_bytes if results.waits else 0,
    )


_CE = triton_kernel(
    "ce", "cross-entropy that writes the gradient over the logits", "cross_entropy:cross_entropy", _memory
)
SPECS = (_CE, plain_torch(_CE, "cross-entropy in plain torch, upcast to fp32"))
