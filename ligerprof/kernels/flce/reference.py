"""Linear layer and cross-entropy in plain torch: the logits whole."""

from torch import Tensor
from torch.nn import functional

from ligerprof.kernels.ce import reference as ce
from ligerprof.kernels.options import PLAIN_LOSS, LossOptions


def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    options: LossOptions = PLAIN_LOSS,
    bias: Tensor | None = None,
    num_items: Tensor | float | None = None,
) -> Tensor:
    """Cross-entropy of `hidden @ weight.T + bias` [..., V] against labels [...]."""
    return ce.cross_entropy(functional.linear(hidden, weight, bias), labels, options, num_items)
