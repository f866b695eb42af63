"""Losses over a vocabulary that is split over ranks: each rank reduces its own words, then one exchange per chunk.

Axes: N tokens (rows), B words of this rank, S statistics, R ranks.
"""

import torch
from torch import Tensor, distributed

from ligerprof.errors import KernelInputError
from ligerprof.kernels.cross_entropy.arguments import LossArguments
from ligerprof.kernels.cross_entropy.blocks import count_words, finish_rows, gradient_of_words
from ligerprof.kernels.cross_entropy.spec import statistics_per_token
from ligerprof.kernels.options import VocabularyShard
from ligerprof.kernels.sizes import ceil_div


def loss_and_gradient_of_shard(
    arguments: LossArguments, logits_NB: Tensor, *, wants_gradient: bool, first_row: int = 0, is_padded: bool = False
) -> None:
    """Write the results of whole rows of this rank's words, and the gradient over the logits if it is wanted.

    Args:
        is_padded: whether the elements between the rows may be overwritten.
    """
    shard = arguments.shard
    assert shard is not None
    rows = logits_NB.shape[0]
    count = statistics_per_token(entropy=arguments.computes_entropy)
    # one more row for the predictions
    statistics_SN = torch.empty(count + 1, rows, dtype=torch.float32, device=logits_NB.device)
    count_words(arguments, logits_NB, statistics_SN, first_row=first_row, is_last=False, is_padded=is_padded)
    prediction_N = arguments.prediction_N
    if prediction_N is not None:
        prediction_N = prediction_N.view(-1)[first_row : first_row + rows]
        statistics_SN[count] = prediction_N
    gathered_RSN = _gather(statistics_SN, shard)
    total_SN = _combined(gathered_RSN, entropy=arguments.computes_entropy)
    if prediction_N is not None:
        # where ranks are equal, the first one has the first word
        best_1N = gathered_RSN[:, 0].argmax(0, keepdim=True)
        prediction_N.copy_(gathered_RSN[:, count].gather(0, best_1N).view(-1))
    finish_rows(arguments, total_SN, first_row=first_row)
    if wants_gradient:
        gradient_of_words(arguments, logits_NB, total_SN, first_row=first_row, is_padded=is_padded)


def _gather(statistics_SN: Tensor, shard: VocabularyShard) -> Tensor:
    ranks = distributed.get_world_size(shard.group)
    gathered_RSN = statistics_SN.new_empty(ranks, *statistics_SN.shape)
    # the name from torch 2.13 on; the older one warns there
    all_gather = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
    all_gather(gathered_RSN.view(-1, statistics_SN.shape[1]), statistics_SN, group=shard.group)
    return gathered_RSN


def _combined(gathered_RSN: Tensor, *, entropy: bool) -> Tensor:
    """The statistics of all words, in the same order of summation on each rank."""
    highest_RN, total_RN, label_RN, sum_RN = gathered_RSN[:, :4].unbind(1)
    highest_N = highest_RN.amax(0)
    share_RN = torch.exp(highest_RN - highest_N)
    rows = [highest_N, (total_RN * share_RN).sum(0), label_RN.sum(0), sum_RN.sum(0)]
    if entropy:
        spread_RN = gathered_RSN[:, 4] + total_RN * (highest_RN - highest_N)
        rows.append((spread_RN * share_RN).sum(0))
    return torch.stack(rows)


def sum_over_ranks(grad: Tensor, shard: VocabularyShard) -> None:
    """Add up a gradient over the ranks, in place."""
    distributed.all_reduce(grad, group=shard.group)


def even_share(shard: VocabularyShard) -> int:
    """The most words of a rank if the vocabulary is split evenly, which each rank knows of all others."""
    return ceil_div(shard.vocab, distributed.get_world_size(shard.group))


def check_shard(kernel: str, shard: VocabularyShard, words: int) -> None:
    """Raise an error for words that are not the shard's, or not in the vocabulary.

    Raises:
        KernelInputError: see above.
    """
    if shard.stop - shard.start != words or not 0 <= shard.start <= shard.stop <= shard.vocab:
        raise KernelInputError(
            f"{kernel}: {words} words are not the words {shard.start} to {shard.stop} of a vocabulary of {shard.vocab}."
            " Give the shard that the rank's rows are: VocabularyShard.of_rank(vocab)."
        )
