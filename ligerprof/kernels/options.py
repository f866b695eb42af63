"""The options of a loss over the vocabulary; torch is not imported."""

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ligerprof.errors import RecipeError

if TYPE_CHECKING:
    from torch import Tensor

REDUCTIONS = ("mean", "sum", "none")
IGNORE_INDEX = -100


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOptions:
    """How a loss over the vocabulary is computed. Every provider receives the same object.

    Attributes:
        shift: labels are the tokens themselves: position t is scored against label t + 1, and the
            last position of each sequence is ignored. Needs labels of shape [sequences, tokens].
        ignore_index: the label of positions to leave out.
        reduction: `mean` over the labels that are not ignored, `sum`, or `none` (one loss per token).
        label_smoothing: share of the target that is spread evenly over the vocabulary, in [0, 1).
        z_loss: weight of the squared log-sum-exp that is added to each token's loss.
        softcap: logits become `softcap * tanh(logits / softcap)`, or None.
        logit_scale: factor on the logits, applied before the softcap.
        budget: workspace of the fused loss: `lean`, `balanced`, or bytes.
        accumulate_fp32: sum the head's gradient over chunks in fp32 (fused loss).
        in_place: write the gradient over the logits (loss on given logits).

    Raises:
        RecipeError: a value out of range.
    """

    shift: bool = False
    ignore_index: int = IGNORE_INDEX
    reduction: str = "mean"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    budget: str | int = "balanced"
    accumulate_fp32: bool = False
    in_place: bool = False

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise RecipeError(f"unknown reduction {self.reduction!r}. Known: {', '.join(REDUCTIONS)}.")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise RecipeError(f"label smoothing is {self.label_smoothing}. It must be in [0, 1).")
        if self.softcap is not None and self.softcap <= 0:
            raise RecipeError(f"the softcap is {self.softcap}. It must be positive, or None.")
        if self.logit_scale <= 0:
            raise RecipeError(f"the logit scale is {self.logit_scale}. It must be positive.")


PLAIN_LOSS = LossOptions()


@dataclass(frozen=True, kw_only=True, slots=True)
class LossRequest:
    """One call of a loss, apart from the tensors that may want a gradient.

    Attributes:
        num_items: divisor of the reduction `mean`, instead of the number of labels.
        class_weight: [V], or None.
        predictions: shaped like the labels, receives each position's most likely word; or None.
        token_scale: factor on each token's gradient, which backward receives if nothing is reduced; or None.
    """

    labels: "Tensor"
    options: LossOptions
    num_items: "Tensor | float | None" = None
    class_weight: "Tensor | None" = None
    predictions: "Tensor | None" = None
    token_scale: "Tensor | None" = None


def options_as_text(options: LossOptions) -> str:
    """The options as a string, which can be an argument of a custom operator."""
    return repr([getattr(options, name) for name in _FIELDS])


def options_from_text(text: str) -> LossOptions:
    """The inverse of `options_as_text`."""
    return LossOptions(**dict(zip(_FIELDS, ast.literal_eval(text), strict=True)))


_FIELDS = tuple(LossOptions.__slots__)
