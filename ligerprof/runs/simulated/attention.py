"""Choose the attention kernel that CUDA would choose."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from ligerprof.errors import NotBuiltError
from ligerprof.gpus import GpuSpec

aten = torch.ops.aten


def attention_for(gpu: GpuSpec) -> Callable[..., Tensor]:
    """scaled_dot_product_attention as it runs on `gpu`."""
    if gpu.compute_capability < (9, 0):
        raise NotBuiltError(f"attention as {gpu.title} chooses it is not modelled yet. Use --gpu h200.")

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
        if query.element_size() == 2 and attn_mask is None:
            statistics = torch.is_grad_enabled() and query.requires_grad
            cudnn = aten._scaled_dot_product_cudnn_attention.default
            return cast(Tensor, cudnn(query, key, value, None, statistics, dropout_p, is_causal, scale=scale)[0])
        math = aten._scaled_dot_product_attention_math.default
        options = {"scale": scale, "enable_gqa": enable_gqa}
        return cast(Tensor, math(query, key, value, attn_mask, dropout_p, is_causal, None, **options)[0])

    return scaled_dot_product_attention
