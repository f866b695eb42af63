"""From a loss request to the loss and its gradients: what both losses share, compiled or not.

Of a vocabulary that is split over ranks, each rank reduces its own words; then follows one exchange per chunk.

Axes: N tokens (rows), V vocabulary, B words of this rank, S statistics, R ranks.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, distributed

from ligerprof.errors import KernelInputError, LabelError
from ligerprof.kernels.cross_entropy.arguments import LossArguments
from ligerprof.kernels.cross_entropy.blocks import count_words, finish_rows, gradient_of_words
from ligerprof.kernels.cross_entropy.factors import (
    loss_factor,
    reduce_losses,
    token_accuracy,
    waits_for_loss_scale,
)
from ligerprof.kernels.cross_entropy.reference import next_labels
from ligerprof.kernels.cross_entropy.rows import loss_and_gradient
from ligerprof.kernels.cross_entropy.spec import statistics_per_token
from ligerprof.kernels.device import is_simulated
from ligerprof.kernels.options import IncomingGradients, LossOptions, LossOutputs, LossRequest, VocabularyShard
from ligerprof.kernels.sizes import ceil_div

# runs the row kernels over all tokens
Launch = Callable[[LossArguments], None]


def compute_loss(request: LossRequest, words: int, launch: Launch, like: Tensor) -> tuple[LossOutputs, Tensor | None]:
    """The results, and the factor that their gradients still lack (one element), or None: see `waits_for_loss_scale`.

    Args:
        words: words of the vocabulary, or of this rank's part.
        launch: writes results and gradients.
        like: a tensor of the logits' device and dtype.

    Raises:
        KernelInputError: there is not one class weight per word, or a shard or a label that is checked is outside
            the vocabulary.
    """
    check_labels(request.labels, request.options, words if request.shard is None else request.shard.vocab)
    arguments = _with_results(_arguments(request, words, like.device), request)
    options, shape = request.options, request.labels.shape
    per_token = {
        "lse": _shaped(arguments.lse_N, shape),
        "entropy": _shaped(arguments.entropy_N, shape),
        "predicted_tokens": _shaped(arguments.prediction_N, shape) if "predicted_tokens" in request.returns else None,
    }
    if options.reduction == "none":
        launch(arguments)
        accuracy = _right_tokens(arguments, request) if "token_accuracy" in request.returns else None
        outputs = LossOutputs(
            loss=arguments.loss_N.view(shape),
            z_loss=_shaped(arguments.z_loss_N, shape),
            token_accuracy=accuracy,
            **per_token,
        )
        return outputs, None
    factor = loss_factor(arguments, request.num_items)
    total = torch.empty((), dtype=torch.float32, device=like.device)
    z_loss = None if arguments.z_loss_N is None else torch.empty_like(total)
    accuracy = torch.empty_like(total) if "token_accuracy" in request.returns else None
    waits = waits_for_loss_scale(like.dtype)
    launch(dataclasses.replace(arguments, scale=None if waits else factor))
    reduce_losses(arguments.loss_N, factor, total)
    if arguments.z_loss_N is not None and z_loss is not None:
        reduce_losses(arguments.z_loss_N, factor, z_loss)
    if arguments.prediction_N is not None and accuracy is not None:
        token_accuracy(arguments, arguments.prediction_N, accuracy)
    outputs = LossOutputs(loss=total, z_loss=z_loss, token_accuracy=accuracy, **per_token)
    return outputs, factor if waits else None


def compute_waiting_gradients(
    request: LossRequest, incoming: IncomingGradients, words: int, launch: Launch, like: Tensor
) -> None:
    """Launch the gradients of a request whose gradients wait for those of its results."""
    arguments = _arguments(request, words, like.device)
    loss_grad = incoming.loss
    if loss_grad is None:
        scale = torch.zeros(1, dtype=torch.float32, device=like.device)
    elif request.options.reduction == "none":
        scale = loss_grad.reshape(-1).contiguous()
    else:
        scale = loss_factor(arguments, request.num_items).mul_(loss_grad)
    launch(
        dataclasses.replace(
            arguments,
            scale=scale,
            lse_grad_N=None if incoming.lse is None else incoming.lse.reshape(-1).contiguous(),
            entropy_grad_N=None if incoming.entropy is None else incoming.entropy.reshape(-1).contiguous(),
            computes_entropy=incoming.entropy is not None,
        )
    )


def _arguments(request: LossRequest, words: int, device: torch.device) -> LossArguments:
    """The launches' arguments, with the losses as the only results."""
    vocab = words if request.shard is None else request.shard.vocab
    items = request.num_items
    if isinstance(items, Tensor) and items.numel() != 1:
        raise KernelInputError(f"num_items has the shape {tuple(items.shape)}. Give one number.")
    if request.shard is not None:
        check_shard("a loss", request.shard, words)
    weight_V = request.class_weight
    if weight_V is not None:
        if weight_V.shape != (vocab,):
            raise KernelInputError(
                f"class weights of shape {tuple(weight_V.shape)} do not match a vocabulary of {vocab}."
                " Give one weight per word."
            )
        weight_V = weight_V.detach().to(device).contiguous()
    arguments = LossArguments(
        labels_N=request.labels.to(device).reshape(-1).contiguous(),
        loss_N=torch.empty(request.labels.numel(), dtype=torch.float32, device=device),
        seq_len=request.labels.shape[-1] if request.labels.ndim > 0 else 1,
        vocab=vocab,
        words=words,
        options=request.options,
        class_weight_V=weight_V,
        shard=request.shard,
    )
    options = request.options
    if weight_V is None or not (options.label_smoothing > 0 or options.z_loss > 0):
        return arguments
    sums = torch.ones(2, dtype=torch.float32, device=device)
    torch.sum(weight_V, 0, dtype=torch.float32, out=sums[0])
    if options.z_loss > 0:
        # a mean divides the z-loss by the number of labels, the loss by the sum of their weights
        of_count = loss_factor(dataclasses.replace(arguments, class_weight_V=None), items)
        torch.div(of_count[0], loss_factor(arguments, items)[0], out=sums[1])
    return dataclasses.replace(arguments, class_weight_sums=sums)


def _with_results(arguments: LossArguments, request: LossRequest) -> LossArguments:
    """The arguments with memory for each further result."""
    wanted, loss_N = request.returns, arguments.loss_N
    prediction_N = request.predictions
    if prediction_N is None and ("predicted_tokens" in wanted or "token_accuracy" in wanted):
        prediction_N = torch.empty(loss_N.shape, dtype=torch.int64, device=loss_N.device)
    return dataclasses.replace(
        arguments,
        prediction_N=prediction_N,
        lse_N=torch.empty_like(loss_N) if "lse" in wanted else None,
        entropy_N=torch.empty_like(loss_N) if "entropy" in wanted else None,
        z_loss_N=torch.empty_like(loss_N) if "z_loss" in wanted else None,
        computes_entropy="entropy" in wanted,
    )


def _shaped(value_N: Tensor | None, shape: torch.Size) -> Tensor | None:
    return None if value_N is None else value_N.view(shape)


def _right_tokens(arguments: LossArguments, request: LossRequest) -> Tensor | None:
    """1.0 for each label that was predicted, else 0.0; a label that is ignored never equals its prediction of -1."""
    if arguments.prediction_N is None:
        return None
    shape = request.labels.shape
    targets = next_labels(arguments.labels_N.view(shape), request.options)
    right = arguments.prediction_N.view(shape) == targets
    if request.options.ignore_index == _IGNORED_PREDICTION:
        right &= targets != _IGNORED_PREDICTION
    return right.to(torch.float32)


_IGNORED_PREDICTION = -1


def check_label_shape(logits: Tensor, labels: Tensor) -> None:
    """Raise an error unless there is one label per row.

    Raises:
        KernelInputError: see above.
    """
    check_label_dtype("ce", labels)
    if labels.shape != logits.shape[:-1]:
        raise KernelInputError(
            f"ce: labels of shape {tuple(labels.shape)} do not match logits of shape {tuple(logits.shape)}."
            " Give one label per row."
        )


def check_label_dtype(kernel: str, labels: Tensor) -> None:
    """Raise an error unless labels are numbers of words.

    Raises:
        KernelInputError: see above.
    """
    if labels.dtype == torch.bool or labels.is_floating_point() or labels.is_complex():
        raise KernelInputError(
            f"{kernel}: {labels.dtype} labels of shape {tuple(labels.shape)} were given. Give one integer per row;"
            " the kernels do not take probabilities as targets."
        )


def check_labels(labels: Tensor, options: LossOptions, vocab: int) -> None:
    """Raise an error for a label outside the vocabulary, if that is wanted or costs no transfer from a GPU.

    Labels that no position is scored against are not checked.

    Raises:
        LabelError: there is such a label.
    """
    wanted = labels.device.type == "cpu" if options.check_labels is None else options.check_labels
    if not wanted or is_simulated():
        return
    # a view: next_labels allocates
    targets = labels[..., int(options.shift) :] if labels.ndim > 0 else labels
    outside = ((targets < 0) | (targets >= vocab)) & (targets != options.ignore_index)
    if outside.any():
        first = targets[outside][0].item()
        raise LabelError(
            f"label {first} is out of bounds for a vocabulary of {vocab}, and not {options.ignore_index}, which is"
            " ignored."
        )


def loss_of_logits(
    logits_NV: Tensor, grad_NV: Tensor | None, request: LossRequest
) -> tuple[LossOutputs, Tensor | None]:
    """`compute_loss` over given logits; their gradient goes to `grad_NV` unless that is None."""
    return compute_loss(request, logits_NV.shape[1], _launch_rows(logits_NV, grad_NV), logits_NV)


def waiting_gradient_of_logits(
    logits_NV: Tensor, grad_NV: Tensor, request: LossRequest, incoming: IncomingGradients
) -> None:
    """`compute_waiting_gradients` of given logits."""
    launch = _launch_rows(logits_NV, grad_NV)
    compute_waiting_gradients(request, incoming, logits_NV.shape[1], launch, logits_NV)


def _launch_rows(logits_NV: Tensor, grad_NV: Tensor | None) -> Launch:
    def launch(arguments: LossArguments) -> None:
        if arguments.shard is None:
            loss_and_gradient(arguments, logits_NV, grad_NV)
        elif grad_NV is None:
            loss_and_gradient_of_shard(arguments, logits_NV, wants_gradient=False)
        else:
            if grad_NV is not logits_NV:
                grad_NV.copy_(logits_NV)
            loss_and_gradient_of_shard(arguments, grad_NV, wants_gradient=True)

    return launch


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
