"""Bytes of 4-bit and 8-bit weights, of 8-bit moments and of GaLore's projected moments, tensor by tensor.

Read in bitsandbytes 0.50.2 and galore_torch 1.0.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ligerprof.torch_memory.dtypes import FP32_BYTES, highest_bytes
from ligerprof.torch_memory.libraries import svd_scratch

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


def has_eight_bit_moments(elements: int) -> bool:
    """Whether AdamW8bit keeps a tensor's moments in 8 bits; those of small tensors stay fp32."""
    return elements >= _EIGHT_BIT_SMALLEST


def eight_bit_state_sizes(elements: int) -> tuple[int, ...]:
    """Two moments of 8 bits with an fp32 scale for each block of 256; of small tensors two in fp32."""
    if not has_eight_bit_moments(elements):
        return (elements * FP32_BYTES,) * 2
    scale_bytes = eight_bit_blocks(elements) * FP32_BYTES
    return elements, elements, scale_bytes, scale_bytes


def eight_bit_blocks(elements: int) -> int:
    """Blocks that share a scale."""
    return -(-elements // _EIGHT_BIT_BLOCK)


def is_hidden_matrix(*, in_layer: bool, dimensions: int) -> bool:
    """Whether GaLore projects a parameter's gradient and Muon orthogonalizes it: matrices of decoder layers alone."""
    return in_layer and dimensions == 2


@dataclass(frozen=True, kw_only=True, slots=True)
class GaloreTensor:
    """A parameter as galore_torch's AdamW sees it.

    Attributes:
        width: bytes per element.
        rank: of the projection; None if the gradient is not projected.
    """

    shape: tuple[int, ...]
    elements: int
    width: int
    rank: int | None

    @property
    def size_bytes(self) -> int:
        """Bytes of the parameter."""
        return self.elements * self.width

    @property
    def step_bytes(self) -> int:
        """Bytes of the gradient that Adam reads: the longer side times the rank (GaLoreProjector.project, `std`)."""
        if self.rank is None:
            return self.size_bytes
        return max(self.shape) * min(self.rank, *self.shape) * self.width

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """Projection and two moments of a projected tensor, else two moments.

        The projection of an fp32 gradient is a view of all singular vectors of the shorter side, so all of them stay;
        in 16 bits it is a copy of the first ones (get_orthogonal_matrix).
        """
        moments = (self.step_bytes, self.step_bytes)
        if self.rank is None:
            return moments
        shorter = min(self.shape)
        vectors = shorter if self.width == FP32_BYTES else min(self.rank, shorter)
        return vectors * shorter * self.width, *moments

    @property
    def decomposition_bytes(self) -> int:
        """What the singular value decomposition of its gradient takes, without a workspace that is not known.

        An fp32 copy of a 16-bit gradient, the copy that is overwritten, both sets of vectors, and the workspace
        (get_orthogonal_matrix in galore_torch; `svd_scratch`).
        """
        if self.rank is None:
            return 0
        rows, columns = self.shape
        copies = 0 if self.width == FP32_BYTES else 1
        vectors_bytes = (self.elements + min(self.shape) ** 2) * FP32_BYTES
        return copies * self.elements * FP32_BYTES + vectors_bytes + highest_bytes(svd_scratch(rows, columns))


def galore_update_bytes(tensors: Iterable[GaloreTensor]) -> int:
    """The most that the optimizer's step holds: galore_torch's Adam goes tensor by tensor (adamw.py, `step`).

    Each tensor's denominator and normalized gradient live in variables until the next tensor's take their place. A
    projected one also has its projected gradient, and what is projected back before and after it is scaled. Tensors
    that are not projected come first.
    """
    most_bytes = denominator = normalized = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.rank is not None):
        low = tensor.step_bytes
        gradient, made = (0, 2 * low) if tensor.rank is None else (low, 3 * low + 2 * tensor.size_bytes)
        most_bytes = max(most_bytes, gradient + denominator + low + normalized, gradient + low + normalized + low, made)
        denominator, normalized = low, tensor.size_bytes
    return most_bytes
