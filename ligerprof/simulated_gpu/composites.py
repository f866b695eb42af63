"""Operators that have a kernel for CUDA which calls other operators: nn.TransformerEncoder, nn.EmbeddingBag."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from ligerprof.simulated_gpu.attention import allowed_kernels, problem_of
from ligerprof.torch_memory.attention import AttentionKernel, choose_kernel

aten = torch.ops.aten

# operators.Operators, which uses these rules
Operators = Any
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def _in_parts(_run: Operators, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The CPU's kernel calls the same operators as CUDA's, each of which runs on the tensors' device."""
    return func.redispatch(_CPU, *args, **kwargs)


def _multi_head_attention(run: Operators, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """native_multi_head_attention_cuda: a fused kernel where one takes it, else as on the CPU."""
    query, key, value, width, heads, weight, bias, out_weight, out_bias, *rest = args
    mask, need_weights = (*rest, *(None, True)[len(rest) :])[:2]
    if query is key and key is value and mask is None and not need_weights:
        split = query.view(query.shape[0], -1, heads, width // heads).transpose(1, 2)
        problem = problem_of(split, split, split)
        if choose_kernel(problem, run.device.gpu, allowed_kernels()) is not AttentionKernel.MATH:
            parts = F.linear(query, weight, bias).chunk(3, -1)
            queries, keys, values = (part.view(*query.shape[:2], heads, -1).transpose(1, 2) for part in parts)
            seen = F.scaled_dot_product_attention(queries, keys, values)
            return F.linear(seen.transpose(1, 2).reshape(query.shape), out_weight, out_bias), None
    return _in_parts(run, func, args, kwargs)


def _transform_bias_rescale_qkv(_run: Operators, _func: Any, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Any:
    """transform_bias_rescale_qkv_cuda: query, key and value in one block."""
    packed, _, heads = args
    batch, length, width = packed.shape
    return packed.new_empty((3, batch, heads, length, width // 3 // heads)).unbind(0)


COMPOSITE_RULES: dict[Any, Callable[[Operators, Any, Sequence[Any], Mapping[str, Any]], Any]] = {
    aten._transformer_encoder_layer_fwd.default: _in_parts,
    aten._embedding_bag_backward.default: _in_parts,
    aten._native_multi_head_attention.default: _multi_head_attention,
    aten._transform_bias_rescale_qkv.default: _transform_bias_rescale_qkv,
}
