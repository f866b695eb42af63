"""Choose the attention kernel that CUDA would choose, and prepare its mask as CUDA would.

The checks are those of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp in torch 2.11 that can fail for a language
model; the preparations are those of scaled_dot_product_attention in aten/src/ATen/native/transformers/attention.cpp.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ligerprof.gpus import GpuSpec

aten = torch.ops.aten

# check_prefer_cudnn_attention: the generations where cuDNN comes first
_CUDNN_FIRST = (9, 10)
_CUDNN_LARGEST_HEAD = 128
_CUDNN_LARGEST_HEAD_HOPPER = 256
_FLASH_LARGEST_HEAD = 256
# pad_last_dim<8> before flash, and mem_eff_alignment in pad_bias
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Problem:
    """What the choice of a kernel looks at."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    causal: bool
    grouped: bool

    @property
    def half(self) -> bool:
        """Whether it computes in 16 bits."""
        return self.query.element_size() == 2

    @property
    def heads_match(self) -> bool:
        """Whether keys and values have a head for each of the query's."""
        return self.query.shape[1] == self.key.shape[1] == self.value.shape[1]

    @property
    def needs_grad(self) -> bool:
        """should_compute_logsumexp."""
        inputs = (self.query, self.key, self.value)
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)


def choose_kernel(problem: Problem, gpu: GpuSpec) -> str:
    """`cudnn`, `flash`, `efficient` or `math` (select_sdp_backend)."""
    if gpu.compute_capability[0] in _CUDNN_FIRST and _cudnn_can(problem, gpu):
        return "cudnn"
    if _flash_can(problem, gpu):
        return "flash"
    return "efficient" if _efficient_can(problem, gpu) else "math"


def _dense(problem: Problem) -> bool:
    tensors = (problem.query, problem.key, problem.value)
    return all(tensor.dim() == 4 and tensor.stride(-1) == 1 for tensor in tensors)


def _groups_fit(problem: Problem) -> bool:
    return problem.heads_match or (problem.grouped and problem.query.shape[1] % problem.key.shape[1] == 0)


def _cudnn_can(problem: Problem, gpu: GpuSpec) -> bool:
    """can_use_cudnn_attention."""
    limit = _CUDNN_LARGEST_HEAD_HOPPER if gpu.compute_capability == (9, 0) else _CUDNN_LARGEST_HEAD
    widths = (problem.query.shape[-1], problem.value.shape[-1])
    widths_fit = all(width <= limit and width % _ALIGNMENT == 0 for width in widths)
    return problem.half and _dense(problem) and _groups_fit(problem) and widths_fit and problem.key.shape[2] > 1


def _flash_can(problem: Problem, gpu: GpuSpec) -> bool:
    """can_use_flash_attention."""
    if not problem.half or problem.mask is not None or gpu.compute_capability < (8, 0):
        return False
    width = problem.query.shape[-1]
    same_width = width == problem.key.shape[-1] == problem.value.shape[-1]
    square = not problem.causal or problem.query.shape[2] == problem.key.shape[2]
    # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_sm120
    small_chip = (8, 6) <= gpu.compute_capability <= (8, 9)
    trainable = not (small_chip and problem.needs_grad) or width <= 192 or (width > 224 and problem.dropout == 0.0)
    fits = same_width and square and trainable and width <= _FLASH_LARGEST_HEAD
    return fits and _dense(problem) and _groups_fit(problem)


def _efficient_can(problem: Problem, gpu: GpuSpec) -> bool:
    """can_use_mem_efficient_attention; it does not group heads."""
    if not _dense(problem) or not problem.heads_match:
        return False
    if problem.query.dtype == torch.bfloat16 and gpu.compute_capability < (8, 0):
        return False
    alignment = _gemm_alignment(gpu, half=problem.half)
    return all(width % alignment == 0 for width in (problem.query.shape[-1], problem.value.shape[-1]))


def _gemm_alignment(gpu: GpuSpec, *, half: bool) -> int:
    """minimum_gemm_alignment: elements that a tensor core loads at once."""
    if gpu.compute_capability >= (8, 0) or half:
        return 8 if half else 4
    return 1


def attention_for(gpu: GpuSpec, used: set[str]) -> Callable[..., Tensor]:
    """scaled_dot_product_attention as it runs on `gpu`; the kernels it took are added to `used`."""

    def scaled_dot_product_attention(  # noqa: PLR0913
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        problem = Problem(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        kernel = choose_kernel(problem, gpu)
        used.add(kernel)
        scaled = scale if scale is not None else 1.0 / math.sqrt(query.shape[-1])
        return _RUNNERS[kernel](problem, scaled)

    return scaled_dot_product_attention


def _first(results: Any) -> Tensor:
    """The output; what else the operator returned dies in the order in which C++ destroys a tuple."""
    remaining = list(results)
    del results
    output: Tensor = remaining.pop(0)
    while remaining:
        remaining.pop(0)
    return output


def _run_cudnn(problem: Problem, scale: float) -> Tensor:
    mask = _additive_mask(problem)
    operator = aten._scaled_dot_product_cudnn_attention.default
    tensors = (problem.query, problem.key, problem.value, mask, problem.needs_grad)
    return _first(operator(*tensors, problem.dropout, problem.causal, scale=scale))


def _run_flash(problem: Problem, scale: float) -> Tensor:
    width = problem.query.shape[-1]
    missing = -width % _ALIGNMENT
    tensors = [F.pad(tensor, (0, missing)) if missing else tensor for tensor in _inputs(problem)]
    operator = aten._scaled_dot_product_flash_attention.default
    output = _first(operator(*tensors, problem.dropout, problem.causal, scale=scale))
    return output[..., :width] if missing else output


def _run_efficient(problem: Problem, scale: float) -> Tensor:
    mask = _additive_mask(problem)
    if mask is not None:
        mask = _aligned(mask).expand(*problem.query.shape[:3], problem.key.shape[2])
    operator = aten._scaled_dot_product_efficient_attention.default
    tensors = (*_inputs(problem), mask, problem.needs_grad)
    return _first(operator(*tensors, problem.dropout, problem.causal, scale=scale))


def _run_math(problem: Problem, scale: float) -> Tensor:
    mask = _additive_mask(problem)
    return _first(_math(problem, mask, math.sqrt(scale)))


def _math(problem: Problem, mask: Tensor | None, root: float) -> tuple[Tensor, Tensor]:
    """_scaled_dot_product_attention_math step by step: on fake tensors the operator itself would not add in place."""
    original = problem.query.dtype
    wide_query, wide_key, wide_value = (tensor.float() if problem.half else tensor for tensor in _inputs(problem))
    query = wide_query * root
    if problem.causal:
        mask = _causal_mask(problem, query.dtype)
    key, value = (_repeat_heads(tensor, query.shape[1]) for tensor in (wide_key, wide_value))
    scores = torch.matmul(query, key.transpose(-2, -1) * root)
    if mask is not None:
        scores.add_(mask)
    scores = aten._safe_softmax.default(scores, -1)
    if problem.dropout > 0.0:
        scores = aten.dropout.default(scores, problem.dropout, train=True)
    # arguments of the returned tuple are made from the right
    weights = scores.to(original)
    output = torch.matmul(scores, value).to(original)
    # C++ destroys locals in reverse order
    del scores, value, key, query, wide_value, wide_key, wide_query, mask
    return output, weights


def _causal_mask(problem: Problem, dtype: torch.dtype) -> Tensor:
    shape = (problem.query.shape[-2], problem.key.shape[-2])
    visible = torch.ones(shape, dtype=torch.bool, device=problem.query.device).tril()
    return _to_additive(visible, dtype)


def _repeat_heads(tensor: Tensor, heads: int) -> Tensor:
    """pre_process_group_query_attention_input."""
    times = heads // tensor.shape[1]
    return tensor.repeat_interleave(times, 1) if times > 1 else tensor


def _inputs(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    return problem.query, problem.key, problem.value


def _additive_mask(problem: Problem) -> Tensor | None:
    mask = problem.mask
    if mask is None or mask.dtype != torch.bool:
        return mask
    return _to_additive(mask, problem.query.dtype)


def _to_additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of bools becomes one of numbers (convert_boolean_attn_mask)."""
    zero = torch.scalar_tensor(0.0, dtype=dtype, device=visible.device)
    hidden = torch.scalar_tensor(-math.inf, dtype=dtype, device=visible.device)
    additive = torch.where(visible, zero, hidden)
    del hidden, zero
    return additive


def _aligned(mask: Tensor) -> Tensor:
    """Pad rows to a multiple of the alignment and hide the padding again (pad_bias)."""
    keys = mask.shape[-1]
    missing = -keys % _ALIGNMENT
    return F.pad(mask, (0, missing))[..., :keys] if missing else mask


_RUNNERS: dict[str, Callable[[Problem, float], Tensor]] = {
    "cudnn": _run_cudnn,
    "flash": _run_flash,
    "efficient": _run_efficient,
    "math": _run_math,
}
