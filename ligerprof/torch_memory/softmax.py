"""What torch's softmax and log_softmax cast, save and allocate on CUDA."""

from ligerprof.torch_memory.dtypes import DTYPE_BYTES, Scratch, together


def casts_first(dtype: str, result_dtype: str) -> bool:
    """Whether a copy in `result_dtype` is made first: one kernel reads fp16 and writes fp32, others do not convert.

    aten/src/ATen/native/SoftMax.cpp, softmax and log_softmax.
    """
    return dtype != result_dtype and (dtype, result_dtype) != ("float16", "float32")


def backward_scratch(elements: int, gradient_dtype: str, dtype: str) -> Scratch:
    """The product of gradient and output (aten/src/ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out)."""
    return together(elements * max(DTYPE_BYTES[gradient_dtype], DTYPE_BYTES[dtype]))


def safe_scratch(rows: int, columns: int, element_bytes: int) -> Scratch:
    """_safe_softmax looks for rows that are masked whole: a bool per element, a bool per row, and a zero.

    aten/src/ATen/native/transformers/attention.cpp; torch 2.11 fills such rows in place.
    """
    return together(rows * columns, rows, element_bytes)
