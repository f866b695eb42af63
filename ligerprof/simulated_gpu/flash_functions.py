"""The functions of flash-attn that `flash_attn.py` stands in for."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ligerprof.errors import UnsupportedError
from ligerprof.simulated_gpu.values import place

_BLOCK = 128
NAMES = (
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "index_first_axis",
    "pad_input",
    "unpad_input",
)


class _Attention(torch.autograd.Function):
    """mha_fwd and mha_bwd; with `sequences`, mha_varlen_fwd and mha_varlen_bwd."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sequences: int, deterministic: bool) -> Tensor:
        """Attention of [..., tokens, heads, width]; with `sequences`, of as many without a dimension for them."""
        width = query.shape[-1]
        padded = [F.pad(each, (0, -width % 8)) if width % 8 else each for each in (query, key, value)]
        query, key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in padded)
        output = torch.empty_like(query)
        *batch, tokens, heads, _ = query.shape
        sums = torch.empty(*batch, heads, tokens, dtype=torch.float32, device=query.device)
        state = torch.empty(2, dtype=torch.int64, device=query.device)
        ctx.save_for_backward(query, key, value, output, sums, state)
        ctx.sequences, ctx.width, ctx.deterministic = sequences, width, deterministic
        return output[..., :width] if width % 8 else output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The gradients, with fp32 sums of the query's, and for grouped heads those of each head."""
        query, key, value, _output, _sums, _state = ctx.saved_tensors
        (gradient,) = gradients
        dq, dk, dv = (torch.empty_like(each) for each in (query, key, value))
        width = ctx.width
        gradient = F.pad(gradient, (0, -width % 8)) if width % 8 else gradient
        gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
        *batch, tokens, heads, padded = query.shape
        rows = tokens + _BLOCK * ctx.sequences if ctx.sequences else -(-tokens // _BLOCK) * _BLOCK
        wide = {"dtype": torch.float32, "device": query.device}
        softmax_sums = torch.empty(*batch, heads, rows, **wide)
        unit = 32 if padded <= _BLOCK else 64
        shape = (*batch, rows, heads, -(-padded // unit) * unit)
        query_sums = None if ctx.deterministic else torch.empty(*shape, **wide)
        grouped = key.shape[-2] != heads
        expanded = [
            torch.empty(*key.shape[:-2], heads, padded, dtype=key.dtype, device=key.device) for _ in "kv" * grouped
        ]
        for sums, result in zip(expanded, (dk, dv), strict=False):
            torch.sum(sums.view(*result.shape[:-1], -1, padded).transpose(-1, -2), -1, out=result)
        del expanded, query_sums, softmax_sums
        return (*(each[..., :width] for each in (dq, dk, dv)), None, None)


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, *_arguments: Any, deterministic: bool = False, **named: Any
) -> Tensor:
    """Attention of [batch, tokens, heads, width]; raises UnsupportedError if `return_attn_probs` is set."""
    _refuse_probabilities(named)
    return _Attention.apply(q, k, v, 0, deterministic)  # type: ignore[no-any-return, no-untyped-call]


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, *_arguments: Any, deterministic: bool = False, **named: Any
) -> Tensor:
    """Attention of [tokens of all sequences, heads, width]; raises UnsupportedError if `return_attn_probs` is set."""
    _refuse_probabilities(named)
    return _Attention.apply(q, k, v, cu_seqlens_q.numel() - 1, deterministic)  # type: ignore[no-any-return, no-untyped-call]


def _refuse_probabilities(named: Mapping[str, Any]) -> None:
    if named.get("return_attn_probs"):
        raise UnsupportedError(f"{place()}: the stand-in for flash-attn has no return_attn_probs.")


def flash_attn_with_kvcache(*_arguments: Any, **_named: Any) -> Tensor:
    """Decoding with a cache in pages; always raises UnsupportedError."""
    raise UnsupportedError(f"{place()}: the stand-in for flash-attn has no flash_attn_with_kvcache. Use sdpa.")


def index_first_axis(tensor: Tensor, indices: Tensor) -> Tensor:
    """The chosen rows."""
    return tensor[indices]


def unpad_input(states: Tensor, mask: Tensor, *_others: Any) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The rows of [batch, tokens, ...] that the mask keeps, their places, where sequences begin, and their lengths."""
    lengths = mask.sum(-1, dtype=torch.int32)
    indices = torch.nonzero(mask.flatten(), as_tuple=False).flatten()
    starts = F.pad(torch.cumsum(lengths, 0, dtype=torch.int32), (1, 0))
    return states.flatten(0, 1)[indices], indices, starts, int(lengths.max().item()), lengths


def pad_input(states: Tensor, indices: Tensor, batch: int, tokens: int) -> Tensor:
    """The reverse of `unpad_input`."""
    output = torch.zeros(batch * tokens, *states.shape[1:], device=states.device, dtype=states.dtype)
    output[indices] = states
    return output.view(batch, tokens, *states.shape[1:])
