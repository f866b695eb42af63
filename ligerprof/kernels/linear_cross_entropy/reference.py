"""Linear layer and cross-entropy in plain torch, which holds all logits."""

from torch import Tensor
from torch.nn import functional

from ligerprof.kernels.cross_entropy import reference as ce
from ligerprof.kernels.options import PLAIN_LOSS, LossOptions, LossOutputs


def fused_linear_cross_entropy(  # noqa: PLR0913, PLR0917 -- the signature of its slot
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    options: LossOptions = PLAIN_LOSS,
    bias: Tensor | None = None,
    num_items: Tensor | float | None = None,
    class_weight: Tensor | None = None,
    predictions: Tensor | None = None,
    *,
    low_rank: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Cross-entropy of `hidden @ weight.T + bias` [..., V] against labels [...].

    Args:
        predictions: receives each position's most likely word, -1 if its label is ignored.
        low_rank: factors [..., R] and [V, R] whose product is added to the logits.
    """
    logits = functional.linear(hidden, weight, bias)
    if low_rank is not None:
        logits = (logits + functional.linear(*low_rank)).to(logits.dtype)
    if predictions is not None:
        ignored = ce.next_labels(labels, options) == options.ignore_index
        predictions.copy_(logits.argmax(dim=-1).masked_fill(ignored, -1))
    return ce.cross_entropy(logits, labels, options, num_items, class_weight)


def fused_linear_cross_entropy_outputs(  # noqa: PLR0913, PLR0917 -- the arguments of the loss
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    options: LossOptions = PLAIN_LOSS,
    bias: Tensor | None = None,
    num_items: Tensor | float | None = None,
    class_weight: Tensor | None = None,
) -> LossOutputs:
    """Every result of `LossOutputs`."""
    return ce.cross_entropy_outputs(functional.linear(hidden, weight, bias), labels, options, num_items, class_weight)
