"""How many bytes 4-bit weights, 8-bit moments and GaLore's projected moments take, tensor by tensor."""

from collections.abc import Iterable

from ligerprof.analyzers.estimate.tape import Weight
from ligerprof.models.module_names import is_in_layer
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.torch_memory.dtypes import FP32_BYTES

# bitsandbytes/functional.py, quantize_4bit with compress_statistics: weights a scale, scales a scale of scales
NF4_BLOCK, SCALE_BLOCK = 64, 256
_NF4_CODE_BYTES = 16 * FP32_BYTES
_SCALE_CODE_BYTES = 256 * FP32_BYTES
# bitsandbytes/optim/optimizer.py, Optimizer2State.init_state: smaller tensors keep fp32 moments
EIGHT_BIT_BLOCK, EIGHT_BIT_SMALLEST = 256, 4096
# the two tables of values that all tensors share (fill_qmap)
EIGHT_BIT_TABLE_SIZES = (256 * FP32_BYTES, 256 * FP32_BYTES)


def nf4_sizes(elements: int) -> tuple[int, ...]:
    """Bytes of each tensor that holds a weight in NF4 with double quantization, QLoRA's defaults.

    Packed weights, 8-bit scales, their fp32 scales, the table and the offset of the scales, the table of NF4.
    """
    scales = -(-elements // NF4_BLOCK)
    scales_of_scales = -(-scales // SCALE_BLOCK) * FP32_BYTES
    return -(-elements // 2), scales, scales_of_scales, _SCALE_CODE_BYTES, FP32_BYTES, _NF4_CODE_BYTES


def nf4_scale_bytes(elements: int) -> int:
    """Bytes of the scales of a weight's blocks once they are fp32 again."""
    return -(-elements // NF4_BLOCK) * FP32_BYTES


def eight_bit_state_sizes(weight: Weight) -> tuple[int, ...]:
    """Two moments of 8 bits with an fp32 scale for each block of 256; of small tensors two in fp32."""
    if weight.elements < EIGHT_BIT_SMALLEST:
        return (weight.elements * FP32_BYTES,) * 2
    scale_bytes = eight_bit_blocks(weight.elements) * FP32_BYTES
    return weight.elements, weight.elements, scale_bytes, scale_bytes


def eight_bit_blocks(elements: int) -> int:
    """Blocks that share a scale."""
    return -(-elements // EIGHT_BIT_BLOCK)


def is_projected_parameter(name: str, dimensions: int) -> bool:
    """Whether GaLore projects a parameter's gradient: matrices of decoder layers, as its authors do."""
    return is_in_layer(name) and dimensions == 2


def projected(weight: Weight) -> bool:
    """Whether GaLore projects a weight's gradient."""
    return weight.in_layer and len(weight.shape) == 2


def low_rank_elements(weight: Weight, rank: int) -> int:
    """Elements of a projected gradient: the longer side times the rank (GaLoreProjector.project, `std`)."""
    return max(weight.shape) * min(rank, *weight.shape)


def galore_state_sizes(recipe: TrainingRecipe, weight: Weight) -> tuple[int, ...]:
    """Projection and two moments of a projected weight, else two moments as large as the weight.

    The projection of an fp32 gradient is a view of all singular vectors of the shorter side, so
    all of them stay; in 16 bits it is a copy of the first ones (get_orthogonal_matrix).
    """
    if not projected(weight):
        return (weight.size_bytes,) * 2
    shorter = min(weight.shape)
    vectors = shorter if weight.width == FP32_BYTES else min(recipe.galore_rank, shorter)
    moment_bytes = low_rank_elements(weight, recipe.galore_rank) * weight.width
    return vectors * shorter * weight.width, moment_bytes, moment_bytes


def galore_update_bytes(recipe: TrainingRecipe, weights: Iterable[Weight]) -> int:
    """The most that the optimizer's step holds: galore_torch's Adam goes tensor by tensor (adamw.py, `step`).

    Each tensor's denominator and normalized gradient live in variables until the next tensor's
    take their place. A projected one has its projected gradient besides, and what is projected
    back before and after it is scaled. Tensors that are not projected come first.
    """
    most_bytes = denominator = normalized = 0
    for weight in sorted(weights, key=projected):
        if projected(weight):
            low = low_rank_elements(weight, recipe.galore_rank) * weight.width
            made = low + low + low + 2 * weight.size_bytes
        else:
            low = weight.size_bytes
            made = low + low
        gradient = low if projected(weight) else 0
        most_bytes = max(most_bytes, gradient + denominator + low + normalized, gradient + low + normalized + low, made)
        denominator, normalized = low, weight.size_bytes
    return most_bytes


def galore_decomposition_bytes(weights: Iterable[Weight]) -> int:
    """What the singular value decomposition of the largest gradient takes beside cuSOLVER's own workspace.

    An fp32 copy of a 16-bit gradient, the copy that is overwritten, and both sets of vectors
    (get_orthogonal_matrix; `svd_cusolver` in BatchLinearAlgebraLib.cpp).
    """
    held = (
        ((1 if weight.width == FP32_BYTES else 2) * weight.elements + weight.elements + min(weight.shape) ** 2)
        * FP32_BYTES
        for weight in weights
        if projected(weight)
    )
    return max(held, default=0)
