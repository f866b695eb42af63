"""TRL's `chunked_nll`, for `--loss chunked-nll`: the head and the loss in checkpointed chunks of 256 labelled tokens.

Written from `_chunked_cross_entropy_loss` in trl/trainer/sft_trainer.py of TRL 1.14, where it is the default. TRL 1.15
replaced it by kernels. Tokens with a label move to the front; whole chunks behind them are skipped. A chunk saves its
inputs only, and backward computes its logits again.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ligerprof.torch_memory.chunked_losses import TRL_CHUNK_TOKENS

_IGNORED = -100


def make_forward(labelled_tokens: int, evaluated_tokens: int) -> Callable[..., Any]:
    """A model's forward with this loss.

    Args:
        labelled_tokens: tokens of a micro-batch whose successor has a label. TRL reads the number from the GPU.
        evaluated_tokens: the same of an evaluation batch.
    """

    def forward(self: Any, input_ids: Tensor, labels: Tensor, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        hidden = self.base_model(input_ids=input_ids, **kwargs)[0]
        labelled = labelled_tokens if self.training else evaluated_tokens
        covered = max(1, -(-labelled // TRL_CHUNK_TOKENS)) * TRL_CHUNK_TOKENS
        head, cap = self.get_output_embeddings(), getattr(self.config, "final_logit_softcapping", None)
        return CausalLMOutputWithPast(loss=_loss(hidden, head.weight, labels, covered, cap))

    return forward


def _loss(hidden: Tensor, weight: Tensor, labels: Tensor, covered: int, cap: float | None) -> Tensor:
    hidden = hidden[..., :-1, :].reshape(-1, hidden.size(-1))
    labels = labels[..., 1:].reshape(-1)
    has_label = labels != _IGNORED
    count = has_label.sum()
    order = has_label.to(torch.int8).argsort(descending=True, stable=True)
    hidden, labels = hidden[order], labels[order]
    loss, correct, entropy = (hidden.new_zeros((), dtype=torch.float32) for _ in range(3))
    for start in range(0, min(covered, len(labels)), TRL_CHUNK_TOKENS):
        rows = slice(start, start + TRL_CHUNK_TOKENS)
        of_chunk = checkpoint(_chunk, hidden[rows], weight, labels[rows], cap, use_reentrant=False)
        loss, correct, entropy = loss + of_chunk[0], correct + of_chunk[1], entropy + of_chunk[2]
    return loss / count.clamp(min=1)


def _chunk(hidden: Tensor, weight: Tensor, labels: Tensor, cap: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of loss, of correct predictions and of entropies; TRL logs the latter two."""
    logits = (hidden @ weight.to(hidden.dtype).t()).float()
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    log_probabilities = functional.log_softmax(logits, dim=-1)
    loss = functional.nll_loss(log_probabilities, labels, ignore_index=_IGNORED, reduction="sum")
    has_label = labels != _IGNORED
    correct = ((logits.argmax(dim=-1) == labels) & has_label).sum().float()
    entropy = (-(log_probabilities.exp() * log_probabilities).sum(dim=-1) * has_label).sum()
    return loss, correct, entropy
