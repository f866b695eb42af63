"""scaled_dot_product_attention: torch_memory's program executed with torch operators."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ligerprof.gpus import GpuSpec
from ligerprof.torch_memory.attention import AttentionKernel, AttentionProblem, attend, choose_kernel
from ligerprof.torch_memory.dtypes import dtype_name

aten = torch.ops.aten

# torch.nn.attention.sdpa_kernel sets them
_SWITCHES: dict[AttentionKernel, Callable[[], bool]] = {
    AttentionKernel.CUDNN: torch._C._get_cudnn_sdp_enabled,
    AttentionKernel.FLASH: torch._C._get_flash_sdp_enabled,
    AttentionKernel.EFFICIENT: torch._C._get_mem_efficient_sdp_enabled,
    AttentionKernel.MATH: torch._C._get_math_sdp_enabled,
}


def attention_for(gpu_now: Callable[[], GpuSpec], used: set[str]) -> Callable[..., Tensor]:
    """scaled_dot_product_attention as the GPU of the moment runs it; adds the kernels that run to `used`."""

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
        inputs = (query, key, value)
        if not query.dtype == key.dtype == value.dtype:
            raise RuntimeError(
                f"Expected query, key, and value to have the same dtype, but got query.dtype: {query.dtype}"
                f" key.dtype: {key.dtype} and value.dtype: {value.dtype} instead."
            )
        problem = problem_of(*inputs)
        problem = replace(
            problem,
            masked=attn_mask is not None,
            # a bias that is permuted takes no fused kernel (check_last_dim_stride_equals_1_dense)
            dense=problem.dense and (attn_mask is None or attn_mask.stride(-1) == 1),
            causal=is_causal,
            dropout=dropout_p,
            grouped=enable_gqa,
        )
        allowed = allowed_kernels()
        if attn_mask is not None and attn_mask.requires_grad:
            # cuDNN's has no gradient of the bias (use_cudnn_attention in sdp_utils.cpp)
            allowed.discard(AttentionKernel.CUDNN)
        kernel = choose_kernel(problem, gpu_now(), allowed)
        if kernel not in allowed:
            raise RuntimeError("No available kernel. Aborting execution.")
        used.add(kernel.value)
        scaled = scale if scale is not None else 1.0 / math.sqrt(query.shape[-1])
        return attend(_Operations(problem, query, scaled), kernel, problem, inputs, attn_mask)

    return scaled_dot_product_attention


def allowed_kernels() -> set[AttentionKernel]:
    """The kernels that are not switched off."""
    return {kernel for kernel, is_enabled in _SWITCHES.items() if is_enabled()}


def problem_of(query: Tensor, key: Tensor, value: Tensor) -> AttentionProblem:
    """A call with these tensors, and defaults for its other arguments."""
    inputs = (query, key, value)
    *batches, queries, width = query.shape
    heads = batches.pop() if len(batches) > 1 else 1
    return AttentionProblem(
        dtype=dtype_name(query.dtype),
        batch=math.prod(batches),
        heads=heads,
        kv_heads=key.shape[-3] if key.dim() > 3 else 1,
        queries=queries,
        keys=key.shape[-2],
        head_dim=width,
        value_dim=value.shape[-1],
        needs_gradient=torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs),
        dense=all(tensor.dim() == 4 and tensor.stride(-1) == 1 for tensor in inputs),
    )


class _Operations:
    """AttentionOperations on tensors, which are freed with their last reference; `scale`: the factor of the scores."""

    def __init__(self, problem: AttentionProblem, query: Tensor, scale: float) -> None:
        self._problem, self._scale = problem, scale
        self._dtype, self._device = query.dtype, query.device

    def additive_mask(self, mask: Tensor) -> Tensor:
        return self._to_additive(mask, self._dtype) if mask.dtype == torch.bool else mask

    def causal_mask(self) -> Tensor:
        shape = (self._problem.queries, self._problem.keys)
        return self._to_additive(torch.ones(shape, dtype=torch.bool, device=self._device).tril(), torch.float32)

    def pad_heads(self, tensor: Tensor, missing: int) -> Tensor:
        return F.pad(tensor, (0, missing))

    def narrow_heads(self, tensor: Tensor, missing: int) -> Tensor:
        return tensor[..., :-missing]

    def pad_mask(self, mask: Tensor, missing: int) -> Tensor:
        return F.pad(mask, (0, missing))[..., :-missing]

    def run(self, kernel: AttentionKernel, inputs: tuple[Tensor, Tensor, Tensor], mask: Tensor | None) -> Tensor:
        problem = self._problem
        options = (problem.dropout, problem.causal)
        if kernel is AttentionKernel.FLASH:
            return _first(aten._scaled_dot_product_flash_attention.default(*inputs, *options, scale=self._scale))
        if kernel is AttentionKernel.CUDNN:
            operator = aten._scaled_dot_product_cudnn_attention.default
        else:
            operator = aten._scaled_dot_product_efficient_attention.default
            mask = None if mask is None else mask.expand(*inputs[0].shape[:3], problem.keys)
        return _first(operator(*inputs, mask, problem.needs_gradient, *options, scale=self._scale))

    def widen(self, tensor: Tensor) -> Tensor:
        return tensor.float()

    def scale(self, tensor: Tensor) -> Tensor:
        return tensor * math.sqrt(self._scale)

    def repeat_heads(self, tensor: Tensor) -> Tensor:
        times = self._problem.heads // self._problem.kv_heads if self._problem.grouped else 1
        return tensor.repeat_interleave(times, 1) if times > 1 else tensor

    def multiply(self, query: Tensor, key: Tensor) -> Tensor:
        return torch.matmul(query, key.transpose(-2, -1) * math.sqrt(self._scale))

    def add_in_place(self, scores: Tensor, mask: Tensor) -> None:
        scores.add_(mask)

    def softmax(self, scores: Tensor) -> Tensor:
        return cast(Tensor, aten._safe_softmax.default(scores, -1))

    def drop(self, probabilities: Tensor) -> Tensor:
        return cast(Tensor, aten.dropout.default(probabilities, self._problem.dropout, train=True))

    def restore_dtype(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype)

    def weigh(self, probabilities: Tensor, value: Tensor) -> Tensor:
        return torch.matmul(probabilities, value)

    def release(self, *tensors: Tensor | None) -> None:
        """Do nothing: Python drops the references."""

    def replace(self, _old: Tensor, new: Tensor) -> Tensor:
        return new

    def _to_additive(self, visible: Tensor, dtype: torch.dtype) -> Tensor:
        zero = torch.scalar_tensor(0.0, dtype=dtype, device=visible.device)
        hidden = torch.scalar_tensor(-math.inf, dtype=dtype, device=visible.device)
        additive = torch.where(visible, zero, hidden)
        del hidden, zero
        return additive


def _first(results: Any) -> Tensor:
    """The output; the other results are freed in the order in which C++ destroys a tuple."""
    remaining = list(results)
    del results
    output: Tensor = remaining.pop(0)
    while remaining:
        remaining.pop(0)
    return output
