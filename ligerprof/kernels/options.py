"""The options of a loss over the vocabulary; torch is not imported."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ligerprof.errors import KernelInputError, RecipeError

if TYPE_CHECKING:
    from torch import Tensor

REDUCTIONS = ("mean", "sum", "none")
IGNORE_INDEX = -100
# results besides the loss; the first two have a gradient
WITH_GRADIENT = ("lse", "entropy")
RETURNS = (*WITH_GRADIENT, "z_loss", "token_accuracy", "predicted_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOptions:
    """How a loss over the vocabulary is computed. Every provider receives the same object.

    Attributes:
        shift: labels are the tokens themselves: position t is scored against label t + 1 (or t + `shift`, if that is
            a number), and the last positions of each sequence are ignored. Needs labels of shape [sequences, tokens].
        ignore_index: the label of positions to leave out.
        reduction: `mean` over the labels that are not ignored, `sum`, or `none` (one loss per token).
        label_smoothing: share of the target that is spread evenly over the vocabulary, in [0, 1].
        z_loss: weight of the squared log-sum-exp that is added to each token's loss. Class weights do not apply to it,
            and a mean divides it by the number of labels.
        softcap: logits become `softcap * tanh(logits / softcap)`, or None.
        logit_scale: factor on the logits, applied before the softcap; one over a temperature.
        token_scaling: multiply each token's loss by the probability of its label, as a constant.
        budget: workspace of the fused loss: `lean`, `balanced`, or bytes.
        accumulate_fp32: sum the head's gradient over chunks in fp32 (fused loss).
        fp32_logits: where no gradient overwrites the logits (in evaluation, and in forward if the gradient waits for
            that of a further result), compute them in fp32 from 16-bit operands, fewer tokens at a time (fused loss).
        in_place: write the gradient over the logits (loss on given logits).
        check_labels: raise an error for labels outside the vocabulary. True: in any case, which makes the host wait
            for a GPU; None: if the labels are on a CPU. A label that is not checked makes its own row NaN.

    Raises:
        RecipeError: a value out of range.
    """

    shift: bool | int = False
    ignore_index: int = IGNORE_INDEX
    reduction: str = "mean"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    token_scaling: bool = False
    budget: str | int = "balanced"
    accumulate_fp32: bool = False
    fp32_logits: bool = False
    in_place: bool = False
    check_labels: bool | None = None

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise RecipeError(f"unknown reduction {self.reduction!r}. Known: {', '.join(REDUCTIONS)}.")
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise RecipeError(f"label smoothing is {self.label_smoothing}. It must be in [0, 1].")
        # also refuse what is not a number
        if self.softcap is not None and not self.softcap > 0:
            raise RecipeError(f"the softcap is {self.softcap}. It must be positive, or None.")
        if not 0 < self.logit_scale < math.inf:
            raise RecipeError(f"the logit scale is {self.logit_scale}. It must be positive and finite.")
        if not 0 <= self.z_loss < math.inf:
            raise RecipeError(f"the z-loss is {self.z_loss}. It must be finite, and not negative.")
        if self.shift < 0:
            raise RecipeError(f"the labels' shift is {self.shift}. It must not be negative.")


PLAIN_LOSS = LossOptions()


class LossOutputs(NamedTuple):
    """What a loss returns; None for a result that was not asked for.

    Attributes:
        loss: fp32; one element, or one per token without reduction.
        lse: log-sum-exp of each token's logits as the loss sees them (scaled and capped), fp32; 0 if the label is
            ignored. With a gradient.
        entropy: of each token's distribution, fp32; 0 if the label is ignored. With a gradient.
        z_loss: the part of the loss that `z_loss` adds, reduced as the loss is. Without a gradient.
        token_accuracy: the share of labels that are their position's most likely word, fp32; without reduction 1.0 or
            0.0 per token.
        predicted_tokens: each position's most likely word, int64; -1 if the label is ignored.
    """

    loss: "Tensor"
    lse: "Tensor | None" = None
    entropy: "Tensor | None" = None
    z_loss: "Tensor | None" = None
    token_accuracy: "Tensor | None" = None
    predicted_tokens: "Tensor | None" = None


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularyShard:
    """A rank's part of a vocabulary that is split over a process group.

    Each rank has the rows of its words (of the head, the bias, or the logits), and the same hidden states, labels and
    class weights. All ranks get the same loss.

    Attributes:
        start: the first word of this rank.
        stop: the word after its last one.
        vocab: words of the whole vocabulary.
        group: a `torch.distributed` process group; None is the default group.
        sum_hidden_gradient: add up the hidden states' gradient over the ranks, so that each gets the whole one. False
            if what made the hidden states does it.
    """

    start: int
    stop: int
    vocab: int
    group: Any = None
    sum_hidden_gradient: bool = True

    @classmethod
    def of_rank(cls, vocab: int, group: Any = None, *, sum_hidden_gradient: bool = True) -> "VocabularyShard":
        """Give this rank its part of an even split; the first ranks take one word more if a remainder is left."""
        from torch import distributed

        ranks, rank = distributed.get_world_size(group), distributed.get_rank(group)
        words, more = divmod(vocab, ranks)
        start = words * rank + min(rank, more)
        stop = start + words + int(rank < more)
        return cls(start=start, stop=stop, vocab=vocab, group=group, sum_hidden_gradient=sum_hidden_gradient)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossRequest:
    """One call of a loss, apart from the tensors that may want a gradient.

    Attributes:
        num_items: divisor of the reduction `mean`, instead of the number of labels.
        class_weight: [V], or None.
        predictions: shaped like the labels, receives each position's most likely word; or None.
        returns: names of further results.
        shard: which words these are, if the vocabulary is split over ranks; or None.
    """

    labels: "Tensor"
    options: LossOptions
    num_items: "Tensor | float | None" = None
    class_weight: "Tensor | None" = None
    predictions: "Tensor | None" = None
    returns: tuple[str, ...] = ()
    shard: VocabularyShard | None = None

    @property
    def waits(self) -> bool:
        """Whether gradients are computed in backward, because each token has factors that forward does not know."""
        return self.options.reduction == "none" or any(name in self.returns for name in WITH_GRADIENT)


@dataclass(frozen=True, kw_only=True, slots=True)
class IncomingGradients:
    """The gradients of a loss's results, which backward receives if gradients wait for it; None is a zero.

    Attributes:
        loss: one element, or one per token without reduction.
        lse: one per token.
        entropy: one per token.
    """

    loss: "Tensor | None" = None
    lse: "Tensor | None" = None
    entropy: "Tensor | None" = None


def checked_returns(returns: Iterable[str]) -> tuple[str, ...]:
    """The names of further results, in the order of `LossOutputs`.

    Raises:
        KernelInputError: there is no such result.
    """
    names = (returns,) if isinstance(returns, str) else tuple(returns)
    for name in names:
        if name not in RETURNS:
            raise KernelInputError(f"a loss has no result {name!r}. Known: {', '.join(RETURNS)}.")
    return tuple(name for name in RETURNS if name in names)


# options as arguments of a custom operator. torch.compile may pass numbers as symbols, which cannot become text
PackedOptions = tuple[list[float], list[int], str]


def pack_options(options: LossOptions) -> PackedOptions:
    """The options as numbers and one text."""
    budget, check_labels = options.budget, options.check_labels
    floats = [options.label_smoothing, options.z_loss, options.softcap or 0.0, options.logit_scale]
    integers = [
        int(options.shift),
        options.ignore_index,
        int(options.token_scaling),
        int(options.accumulate_fp32),
        int(options.in_place),
        int(options.fp32_logits),
        -1 if check_labels is None else int(check_labels),
        -1 if isinstance(budget, str) else budget,
    ]
    return floats, integers, options.reduction + _SEPARATOR + (budget if isinstance(budget, str) else "")


def unpack_options(packed: PackedOptions) -> LossOptions:
    """The inverse of `pack_options`."""
    (label_smoothing, z_loss, softcap, logit_scale), integers, text = packed
    shift, ignore_index, token_scaling, accumulate_fp32, in_place, fp32_logits, check_labels, budget = integers
    reduction, _, budget_word = text.partition(_SEPARATOR)
    return LossOptions(
        shift=shift,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap or None,
        logit_scale=logit_scale,
        token_scaling=bool(token_scaling),
        budget=budget_word or budget,
        accumulate_fp32=bool(accumulate_fp32),
        fp32_logits=bool(fp32_logits),
        in_place=bool(in_place),
        check_labels=None if check_labels < 0 else bool(check_labels),
    )


_SEPARATOR = ","
