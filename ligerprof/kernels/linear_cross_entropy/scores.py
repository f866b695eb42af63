"""Scores of tokens that policies and preferences are trained on: log-probabilities, entropies, log-sum-exps, logits.

No function here holds logits of all tokens and words; each has a gradient.

Axes: N tokens, D hidden, V vocabulary.
"""

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ligerprof.errors import KernelInputError
from ligerprof.kernels.cross_entropy.loss import check_labels
from ligerprof.kernels.cross_entropy.reference import next_labels
from ligerprof.kernels.cross_entropy.triton import cross_entropy_outputs
from ligerprof.kernels.linear_cross_entropy.triton import check_head, fused_linear_cross_entropy_outputs
from ligerprof.kernels.options import IGNORE_INDEX, PLAIN_LOSS, LossOptions, LossOutputs, VocabularyShard
from ligerprof.kernels.tensors import product_dtype


class TokenScores(NamedTuple):
    """Scores of each position, fp32, shaped like the labels; 0 if the label is ignored.

    Attributes:
        log_probs: log-probability of the label.
        entropy: of the position's distribution; None if it was not asked for.
    """

    log_probs: Tensor
    entropy: Tensor | None = None


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    options: LossOptions = PLAIN_LOSS,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    shard: VocabularyShard | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
) -> TokenScores:
    """Log-probabilities of the labels under `softmax((hidden @ weight.T + bias) / temperature)`, and entropies.

    Both have a gradient, which backward computes from the logits of a few tokens at a time.

    Args:
        hidden: [..., D].
        weight: [V, D].
        labels: [...], int64.
        options: shift, ignore_index, softcap, logit_scale, budget and accumulate_fp32 apply.
        temperature: divides the logits, before the softcap.
        entropy: whether to compute entropies, too.
        shard: the words that weight and bias are, if the vocabulary is split over ranks.
        low_rank: factors [..., R] and [V, R] whose product is added to the logits, such as those of LoRA.

    Raises:
        KernelInputError: shapes do not match, or an option has no meaning for a log-probability.
    """
    plain, returns = per_token(options, temperature), ("entropy",) if entropy else ()
    outputs = fused_linear_cross_entropy_outputs(
        hidden, weight, labels, plain, bias, returns=returns, shard=shard, low_rank=low_rank
    )
    return _scores(outputs)


def log_probs(
    logits: Tensor,
    labels: Tensor,
    options: LossOptions = PLAIN_LOSS,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    shard: VocabularyShard | None = None,
) -> TokenScores:
    """`linear_log_probs` of given logits [..., V]; with the option `in_place`, the gradient overwrites them.

    Raises:
        KernelInputError: see `linear_log_probs`.
    """
    plain, returns = per_token(options, temperature), ("entropy",) if entropy else ()
    return _scores(cross_entropy_outputs(logits, labels, plain, returns=returns, shard=shard))


def linear_log_sum_exp(
    hidden: Tensor,
    weight: Tensor,
    options: LossOptions = PLAIN_LOSS,
    bias: Tensor | None = None,
    *,
    shard: VocabularyShard | None = None,
) -> Tensor:
    """Log-sum-exp over the words of `hidden @ weight.T + bias` [..., V], for each position, from fp32 logits.

    Args:
        options: softcap, logit_scale, budget and accumulate_fp32 apply.
        shard: the words that weight and bias are, if the vocabulary is split over ranks.

    Raises:
        KernelInputError: shapes do not match, or an option has no meaning for a log-sum-exp.
    """
    no_labels = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
    plain = dataclasses.replace(per_token(options, 1.0), shift=False, ignore_index=IGNORE_INDEX, fp32_logits=True)
    outputs = fused_linear_cross_entropy_outputs(hidden, weight, no_labels, plain, bias, returns=("lse",), shard=shard)
    assert outputs.lse is not None
    return outputs.lse


def linear_label_logits(
    hidden: Tensor, weight: Tensor, labels: Tensor, options: LossOptions = PLAIN_LOSS, bias: Tensor | None = None
) -> Tensor:
    """The logit of each label, fp32: `hidden @ weight[label] + bias[label]`; 0 if the label is ignored.

    Args:
        hidden: [..., D]; under autocast, it and the weight are cast.
        weight: [V, D].
        labels: [...], int64.
        options: shift, ignore_index, softcap, logit_scale and check_labels apply.

    Raises:
        KernelInputError: shapes do not match, or a label that is checked is outside the vocabulary.
    """
    check_head("label logits", hidden, weight, labels, bias)
    check_labels(labels, options, weight.shape[0])
    dtype = product_dtype(hidden)
    targets = next_labels(labels, options).to(hidden.device, torch.int64)
    counts = targets != options.ignore_index
    in_vocab = (targets >= 0) & (targets < weight.shape[0])
    words = torch.where(counts & in_vocab, targets, 0)
    # embedding sums its gradient in an order that does not change from call to call
    rows = functional.embedding(words, weight.to(dtype))
    z = torch.linalg.vecdot(hidden.to(dtype).float(), rows.float())
    if bias is not None:
        z = z + functional.embedding(words, bias[:, None]).squeeze(-1).float()
    z = z * options.logit_scale
    if options.softcap is not None:
        z = options.softcap * torch.tanh(z / options.softcap)
    # a factor, so that the gradients of a label outside the vocabulary are NaN, too
    return torch.where(counts, z * torch.where(in_vocab | ~counts, 1.0, float("nan")), 0.0)


def per_token(options: LossOptions, temperature: float) -> LossOptions:
    """Options of a loss that is the negative log-probability of each token.

    Raises:
        KernelInputError: an option changes the loss to something else, or the temperature is not positive.
    """
    for name in ("label_smoothing", "z_loss", "token_scaling"):
        if getattr(options, name):
            raise KernelInputError(f"the option {name} belongs to a loss, and not to a score of a token. Leave it out.")
    if not 0 < temperature < math.inf:
        raise KernelInputError(f"the temperature is {temperature}. It must be positive and finite.")
    return dataclasses.replace(options, reduction="none", logit_scale=options.logit_scale / temperature)


def _scores(outputs: LossOutputs) -> TokenScores:
    return TokenScores(-outputs.loss, outputs.entropy)
