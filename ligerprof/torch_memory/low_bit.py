"""Bytes of 4-bit and 8-bit weights and of 8-bit moments, tensor by tensor; read in bitsandbytes 0.50.2."""

from ligerprof.torch_memory.dtypes import FP32_BYTES

# bitsandbytes/functional.py, quantize_4bit with compress_statistics: weights per scale, scales per scale of scales
_NF4_BLOCK, _SCALE_BLOCK = 64, 256
_NF4_CODE_BYTES = 16 * FP32_BYTES
_SCALE_CODE_BYTES = 256 * FP32_BYTES
# bitsandbytes/optim/optimizer.py, Optimizer2State.init_state: smaller tensors keep fp32 moments
_EIGHT_BIT_BLOCK, _EIGHT_BIT_SMALLEST = 256, 4096
# the two tables of values that all tensors share (fill_qmap)
EIGHT_BIT_TABLE_SIZES = (256 * FP32_BYTES, 256 * FP32_BYTES)


def nf4_sizes(elements: int, *, nested: bool) -> tuple[int, ...]:
    """Bytes of each tensor of a weight in NF4: packed weights, scales, the table of NF4, and what nested scales need.

    Args:
        nested: whether the scales have 8 bits, with fp32 scales, a table and an offset of their own; else fp32.
    """
    scales = -(-elements // _NF4_BLOCK)
    if not nested:
        return -(-elements // 2), scales * FP32_BYTES, _NF4_CODE_BYTES
    scales_of_scales = -(-scales // _SCALE_BLOCK) * FP32_BYTES
    return -(-elements // 2), scales, _NF4_CODE_BYTES, scales_of_scales, _SCALE_CODE_BYTES, FP32_BYTES


def nf4_scale_bytes(elements: int, *, nested: bool) -> int:
    """Bytes that nested scales of a weight's blocks take once they are fp32 again; 0 for scales that always are."""
    return 0 if not nested else -(-elements // _NF4_BLOCK) * FP32_BYTES


def int8_sizes(outputs: int, inputs: int) -> tuple[int, int]:
    """Bytes of a weight in LLM.int8: one per weight, and an fp32 scale per output (nn/modules.py, Int8Params)."""
    return outputs * inputs, outputs * FP32_BYTES


def int8_quantization_bytes(tokens: int, inputs: int, *, casts: bool) -> int:
    """The most that quantizing the input of a product takes (backends/cuda/ops.py, int8_vectorwise_quant).

    A copy in fp16 of an input in another dtype, its absolute values, a boolean for each that is an outlier, the rows
    in int8 and their scales.

    Args:
        casts: whether the input is not in fp16.
    """
    return tokens * inputs * ((2 if casts else 0) + 2 + 1 + 1) + tokens * FP32_BYTES


def int8_product_bytes(tokens: int, inputs: int, outputs: int, *, casts: bool) -> int:
    """What a product takes in addition to its result: int8 rows with scales, int32 sums, and their fp16 values.

    Args:
        casts: whether the result is not in fp16, so that the fp16 values are a copy.
    """
    return tokens * (inputs + FP32_BYTES) + tokens * outputs * (4 + (2 if casts else 0))


def eight_bit_state_sizes(elements: int) -> tuple[int, ...]:
    """Two moments of 8 bits with an fp32 scale for each block of 256; of small tensors two in fp32."""
    if elements < _EIGHT_BIT_SMALLEST:
        return (elements * FP32_BYTES,) * 2
    scale_bytes = -(-elements // _EIGHT_BIT_BLOCK) * FP32_BYTES
    return elements, elements, scale_bytes, scale_bytes


def is_hidden_matrix(*, in_layer: bool, dimensions: int) -> bool:
    """Whether GaLore projects a parameter's gradient and Muon orthogonalizes it: matrices of decoder layers alone."""
    return in_layer and dimensions == 2
