"""What torch's foreach operators allocate on CUDA beyond their results."""

from collections.abc import Iterable

from ligerprof.torch_memory.dtypes import FP32_BYTES

# MultiTensorApply.cuh, kChunkSize
_CHUNK = 65_536


def norm_partials_bytes(tensors: Iterable[int]) -> int:
    """A partial norm in fp32 for every tensor and every chunk of the largest one.

    aten/src/ATen/native/cuda/ForeachReduceOp.cu, foreach_tensor_norm_cuda: `output_per_tensor`.

    Args:
        tensors: elements of each tensor.
    """
    elements = list(tensors)
    return FP32_BYTES * len(elements) * max(-(-count // _CHUNK) for count in elements)
