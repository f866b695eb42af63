"""Bytes per element of the dtypes that training uses (torch/headeronly/core/ScalarType.h)."""

from collections.abc import Mapping

FP32_BYTES = 4
HALF_BYTES = 2
INT32_BYTES = 4
# int64: tokens, labels, positions and the indices that CUDA kernels sort
INDEX_BYTES = 8
DTYPE_BYTES: Mapping[str, int] = {"float32": FP32_BYTES, "bfloat16": HALF_BYTES, "float16": HALF_BYTES}


def dtype_name(dtype: object) -> str:
    """The name here of a torch.dtype, such as `float32`."""
    return str(dtype).removeprefix("torch.")
