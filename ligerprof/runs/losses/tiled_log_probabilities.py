"""Log-probabilities of labels from logits in tiles, which exist one at a time.

Written from `ChunkedLogProbFunction` in trl/kernels/chunked_logprob.py of TRL 1.16. Forward folds each tile into
statistics per token. Backward computes each tile again, replaces it by its gradient in place, and accumulates both
gradients in fp32.
"""

from typing import Any

import torch
from torch import Tensor

from ligerprof.kernels.device import is_simulated
from ligerprof.kernels.tensors import first_order_only
from ligerprof.torch_memory.chunked_losses import TRL_TILE_TOKENS, TRL_TILE_WORDS

_HALF = (torch.float16, torch.bfloat16)


class TiledLogProbabilities(torch.autograd.Function):
    """Each label's log-probability; and each token's entropy and whether its label was the prediction, for logs."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, cap: float | None) -> tuple[Tensor, ...]:
        """Fold all tiles into statistics of each token."""
        ctx.set_materialize_grads(False)
        tokens, words = hidden.shape[0], weight.shape[0]
        dtype = _compute_dtype(hidden)
        highest, earlier = (hidden.new_full((tokens,), -torch.inf, dtype=torch.float32) for _ in range(2))
        # TRL makes seven, of which two are not used for this loss
        sums, weighted, _, _, of_label = (hidden.new_zeros((tokens,), dtype=torch.float32) for _ in range(5))
        buffer = hidden.new_empty((min(tokens, TRL_TILE_TOKENS), TRL_TILE_WORDS), dtype=dtype)
        for start in range(0, tokens, TRL_TILE_TOKENS):
            rows = slice(start, min(start + TRL_TILE_TOKENS, tokens))
            read = hidden[rows].to(dtype)
            for first in range(0, words, TRL_TILE_WORDS):
                last = min(first + TRL_TILE_WORDS, words)
                tile = buffer[: len(read), : last - first]
                torch.mm(read, weight[first:last].to(dtype).t(), out=tile)
                statistics = tuple(item[rows] for item in (highest, sums, weighted, earlier, of_label))
                fold(tile, labels[rows], first, cap, statistics)
        normalizer = highest + torch.log(sums)
        entropy = normalizer - weighted / sums
        is_predicted = (of_label >= highest) & (of_label > earlier)
        ctx.save_for_backward(hidden, weight, labels, normalizer, entropy)
        ctx.dtype, ctx.cap = dtype, cap
        ctx.mark_non_differentiable(entropy, is_predicted)
        return of_label - normalizer, entropy, is_predicted

    @staticmethod
    @first_order_only
    def backward(ctx: Any, gradient: Tensor | None, *_unused: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute each tile again, and from it both gradients."""
        if gradient is None:
            return None, None, None, None
        hidden, weight, labels, normalizer, _ = ctx.saved_tensors
        of_hidden, of_weight = (
            torch.zeros_like(item, dtype=torch.float32) if needed else None
            for item, needed in zip((hidden, weight), ctx.needs_input_grad[:2], strict=True)
        )
        tokens, words = hidden.shape[0], weight.shape[0]
        buffer = hidden.new_empty((min(tokens, TRL_TILE_TOKENS), TRL_TILE_WORDS), dtype=ctx.dtype)
        gradient = gradient.float().contiguous()
        for start in range(0, tokens, TRL_TILE_TOKENS):
            rows = slice(start, min(start + TRL_TILE_TOKENS, tokens))
            read = hidden[rows].to(ctx.dtype)
            for first in range(0, words, TRL_TILE_WORDS):
                last = min(first + TRL_TILE_WORDS, words)
                # the tile before keeps its words' weight until this one's is there
                read_weight = weight[first:last].to(ctx.dtype)
                tile = buffer[: len(read), : last - first]
                torch.mm(read, read_weight.t(), out=tile)
                differentiate(tile, labels[rows], first, ctx.cap, normalizer[rows], gradient[rows])
                if of_hidden is not None:
                    _add_product(of_hidden[rows], tile, read_weight)
                if of_weight is not None:
                    _add_product(of_weight[first:last], tile.t(), read)
        return (
            None if of_hidden is None else of_hidden.to(hidden.dtype),
            None if of_weight is None else of_weight.to(weight.dtype),
            None,
            None,
        )


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if is_simulated():
        # cuBLAS has its workspace already, from the tile's product in the same thread
        return
    if total.is_cuda and left.dtype in _HALF:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.float(), right.float())


def fold(tile: Tensor, labels: Tensor, first: int, cap: float | None, statistics: tuple[Tensor, ...]) -> None:
    """Update each token's statistics by a tile of its logits.

    Args:
        first: the tile's first word.
        statistics: the highest logit, the sum of exponentials less the highest logit, the same weighted by the logit,
            the highest logit of words before the label, and the label's logit.
    """
    if tile.is_cuda or is_simulated():
        from ligerprof.runs.losses.tile_kernels import launch_fold

        launch_fold(tile, labels, first, cap, statistics)
        return
    highest, sums, weighted, earlier, of_label = statistics
    logits = _capped(tile.float(), cap)
    own = (labels - first).unsqueeze(-1)
    words = torch.arange(tile.shape[1], device=tile.device)
    torch.maximum(earlier, logits.masked_fill(words >= own, -torch.inf).amax(-1), out=earlier)
    new = torch.maximum(highest, logits.amax(-1))
    decay, raised = torch.exp(highest - new), torch.exp(logits - new.unsqueeze(-1))
    sums.mul_(decay).add_(raised.sum(-1))
    weighted.mul_(decay).add_((raised * logits).sum(-1))
    highest.copy_(new)
    is_inside = (own >= 0) & (own < tile.shape[1])
    found = logits.gather(-1, own.clamp(0, tile.shape[1] - 1))
    of_label.copy_(torch.where(is_inside, found, of_label.unsqueeze(-1)).squeeze(-1))


def differentiate(
    tile: Tensor, labels: Tensor, first: int, cap: float | None, normalizer: Tensor, gradient: Tensor
) -> None:
    """Overwrite a tile of logits, whose first word is `first`, by their gradient."""
    if tile.is_cuda or is_simulated():
        from ligerprof.runs.losses.tile_kernels import launch_differentiate

        launch_differentiate(tile, labels, first, cap, normalizer, gradient)
        return
    logits = _capped(tile.float(), cap)
    is_label = torch.arange(first, first + tile.shape[1], device=tile.device) == labels.unsqueeze(-1)
    result = gradient.unsqueeze(-1) * (is_label.float() - torch.exp(logits - normalizer.unsqueeze(-1)))
    tile.copy_(result if cap is None else result * (1 - (logits / cap) ** 2))


def _capped(logits: Tensor, cap: float | None) -> Tensor:
    return logits if cap is None else cap * torch.tanh(logits / cap)
