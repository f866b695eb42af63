"""What a cross-entropy can be asked for beyond its tensors, without torch."""

import ast
from dataclasses import dataclass

from ligerprof.errors import RecipeError

REDUCTIONS = ("mean", "sum", "none")
IGNORE_INDEX = -100


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOptions:
    """How a loss over the vocabulary is computed. The same object goes to every provider.

    Attributes:
        shift: labels are the tokens themselves: position t is scored against label t + 1, and the
            last position of a sequence is ignored. Needs labels of shape [sequences, tokens].
        ignore_index: the label that counts for nothing.
        reduction: `mean` over the labels that count, `sum`, or `none` (one loss a token).
        label_smoothing: share of the target spread evenly over the vocabulary, 0 up to but not 1.
        z_loss: weight of the squared log-sum-exp added to each token's loss.
        softcap: logits become `softcap * tanh(logits / softcap)`, or None.
        logit_scale: factor on the logits, applied before the softcap.
        budget: for the fused loss: `lean`, `balanced`, or bytes of workspace.
        accumulate_fp32: for the fused loss: sum the head's gradient over chunks in fp32.
        in_place: for the loss on given logits: write their gradient over them.

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
            raise RecipeError(f"label smoothing is {self.label_smoothing}. It is a share from 0 up to but not 1.")
        if self.softcap is not None and self.softcap <= 0:
            raise RecipeError(f"the softcap is {self.softcap}. It is positive, or None.")
        if self.logit_scale <= 0:
            raise RecipeError(f"the logit scale is {self.logit_scale}. It is positive.")


# mean over the labels that count, nothing else
PLAIN_LOSS = LossOptions()


def options_as_text(options: LossOptions) -> str:
    """The options as one string, which an operation of a compiled graph can carry."""
    return repr([getattr(options, name) for name in _FIELDS])


def options_from_text(text: str) -> LossOptions:
    """The inverse of `options_as_text`."""
    return LossOptions(**dict(zip(_FIELDS, ast.literal_eval(text), strict=True)))


_FIELDS = tuple(LossOptions.__slots__)
