"""The memory of the cross-entropy kernel."""

from ligerprof.kernels.spec import KernelMemory, KernelShape, plain_torch, triton_kernel
from ligerprof.torch_memory.dtypes import FP32_BYTES


def _memory(shape: KernelShape) -> KernelMemory:
    """The gradient overwrites the logits; new are the tokens' losses and a factor, which fp16 keeps for backward."""
    return KernelMemory(
        kept_inputs=("logits",),
        output_bytes=FP32_BYTES,
        forward_temporary_bytes=(shape.tokens + 1) * FP32_BYTES,
    )


_CE = triton_kernel(
    "ce", "cross-entropy that writes the gradient over the logits", "cross_entropy:cross_entropy", _memory
)
SPECS = (_CE, plain_torch(_CE, "cross-entropy in plain torch, upcast to fp32"))
