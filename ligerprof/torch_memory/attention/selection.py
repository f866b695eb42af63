"""Decide which attention kernel CUDA runs.

The checks are those of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp in torch 2.11 that can fail for a language
model.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from ligerprof.gpus import GpuSpec, Vendor
from ligerprof.torch_memory.dtypes import DTYPE_BYTES, HALF_BYTES

# check_prefer_cudnn_attention: the generations where cuDNN comes first
_CUDNN_FIRST = (9, 10)
_CUDNN_LARGEST_HEAD = 128
_CUDNN_LARGEST_HEAD_HOPPER = 256
_CUDNN_ALIGNMENT = 8
_FLASH_LARGEST_HEAD = 256
# check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_sm120
_FLASH_LARGEST_TRAINED_HEAD, _FLASH_WIDE_HEAD = 192, 224
_SMALL_BLACKWELL = 12


class AttentionKernel(str, Enum):
    """What scaled_dot_product_attention runs on (SDPBackend)."""

    CUDNN = "cudnn"
    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"

    @property
    def label(self) -> str:
        """Words in front of "kernel"."""
        return _LABELS[self]

    @property
    def operator(self) -> str:
        """The operator that runs it; empty for the one that torch decomposes."""
        return "" if self is AttentionKernel.MATH else f"aten._scaled_dot_product_{self.value}_attention.default"


_LABELS = {
    AttentionKernel.CUDNN: "cuDNN's",
    AttentionKernel.FLASH: "FlashAttention's",
    AttentionKernel.EFFICIENT: "the memory-efficient",
    AttentionKernel.MATH: "no fused",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionProblem:
    """One call of scaled_dot_product_attention, as the choice of a kernel and its allocations depend on it.

    Attributes:
        dtype: of query, key and value, as torch names it.
        kv_heads: heads of key and value.
        queries, keys: tokens per sequence.
        head_dim: elements per head of query and key.
        value_dim: elements per head of value and output.
        masked: whether a mask is passed.
        causal: whether `is_causal` is set.
        grouped: whether `enable_gqa` is set.
        needs_gradient: whether autograd records the call (should_compute_logsumexp).
        dense: whether each tensor has four axes and its last one is contiguous, which the mask's must be, too.
    """

    dtype: str
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    masked: bool = False
    causal: bool = False
    dropout: float = 0.0
    grouped: bool = False
    needs_gradient: bool = True
    dense: bool = True

    @property
    def element_bytes(self) -> int:
        """Bytes per element of query, key and value."""
        return DTYPE_BYTES[self.dtype]

    @property
    def is_half(self) -> bool:
        """Whether it computes in 16 bits."""
        return self.element_bytes == HALF_BYTES

    @property
    def rows(self) -> int:
        """Rows of the score matrices."""
        return self.batch * self.heads * self.queries


def choose_kernel(
    problem: AttentionProblem, gpu: GpuSpec, allowed: Collection[AttentionKernel] = tuple(AttentionKernel)
) -> AttentionKernel:
    """The first kernel that takes the problem, in torch's order of preference (select_sdp_backend).

    Args:
        allowed: the kernels that are not switched off (torch.nn.attention.sdpa_kernel).
    """
    takes = {
        AttentionKernel.CUDNN: gpu.vendor is Vendor.NVIDIA and _cudnn_takes(problem, gpu),
        AttentionKernel.FLASH: _flash_takes(problem, gpu),
        AttentionKernel.EFFICIENT: _efficient_takes(problem, gpu),
        AttentionKernel.MATH: True,
    }
    order = list(takes)
    if gpu.compute_capability[0] not in _CUDNN_FIRST:
        order.append(order.pop(0))
    return next((kernel for kernel in order if takes[kernel] and kernel in allowed), AttentionKernel.MATH)


def _groups_fit(problem: AttentionProblem) -> bool:
    """check_batch_size_and_num_heads_dense of a kernel that groups heads."""
    return problem.heads == problem.kv_heads or (problem.grouped and problem.heads % problem.kv_heads == 0)


def _cudnn_takes(problem: AttentionProblem, gpu: GpuSpec) -> bool:
    """can_use_cudnn_attention."""
    limit = _CUDNN_LARGEST_HEAD_HOPPER if gpu.compute_capability == (9, 0) else _CUDNN_LARGEST_HEAD
    widths = (problem.head_dim, problem.value_dim)
    widths_fit = all(width <= limit and width % _CUDNN_ALIGNMENT == 0 for width in widths)
    return problem.is_half and problem.dense and _groups_fit(problem) and widths_fit and problem.keys > 1


def _flash_takes(problem: AttentionProblem, gpu: GpuSpec) -> bool:
    """can_use_flash_attention; it pads head dimensions that are not multiples of 8."""
    if not problem.is_half or problem.masked or gpu.compute_capability < (8, 0):
        return False
    width = problem.head_dim
    square = not problem.causal or problem.queries == problem.keys
    small_chip = (8, 6) <= gpu.compute_capability <= (8, 9) or gpu.compute_capability[0] == _SMALL_BLACKWELL
    trainable = width <= _FLASH_LARGEST_TRAINED_HEAD or (width > _FLASH_WIDE_HEAD and problem.dropout == 0.0)
    fits = width == problem.value_dim and width <= _FLASH_LARGEST_HEAD and square
    return (
        fits and problem.dense and _groups_fit(problem) and (trainable or not (small_chip and problem.needs_gradient))
    )


def _efficient_takes(problem: AttentionProblem, gpu: GpuSpec) -> bool:
    """can_use_mem_efficient_attention; it does not group heads, and reads bf16 from compute capability 8.0 on."""
    if not problem.dense or problem.heads != problem.kv_heads:
        return False
    if problem.dtype == "bfloat16" and gpu.compute_capability < (8, 0):
        return False
    alignment = _gemm_alignment(problem, gpu)
    return problem.head_dim % alignment == 0 and problem.value_dim % alignment == 0


def _gemm_alignment(problem: AttentionProblem, gpu: GpuSpec) -> int:
    """The number of elements that a tensor core loads at once (minimum_gemm_alignment); 1 without tensor cores."""
    if problem.is_half and gpu.compute_capability >= (7, 0):
        return 8
    return 4 if gpu.compute_capability >= (8, 0) else 1
