"""The arguments that launches of the row kernels share.

Axes: N tokens, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ligerprof.kernels.options import LossOptions

# arguments of one launch, by the kernel's parameter names
Arguments = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossArguments:
    """Arguments shared by every launch over the tokens, regardless of which rows it processes.

    Attributes:
        labels_N: contiguous.
        loss_N: receives the losses in fp32.
        seq_len: tokens per sequence, used if the options shift.
        scale: factor on the gradient, with one element or one per token; None is a factor of one.
        class_weight_sum: one element; None unless labels are smoothed.
        prediction_N: receives the most likely word of each token, -1 if its label is ignored.
    """

    labels_N: Tensor
    loss_N: Tensor
    seq_len: int
    vocab: int
    options: LossOptions
    scale: Tensor | None = None
    bias_V: Tensor | None = None
    class_weight_V: Tensor | None = None
    class_weight_sum: Tensor | None = None
    prediction_N: Tensor | None = None

    def for_labels(self) -> Arguments:
        """Arguments of every kernel."""
        options = self.options
        return {
            "labels_ptr": self.labels_N,
            "bias_ptr": self.bias_V,
            "class_weight_ptr": self.class_weight_V,
            "class_weight_sum_ptr": self.class_weight_sum,
            "seq_len": self.seq_len,
            "ignore_index": options.ignore_index,
            "logit_scale": None if options.logit_scale == 1.0 else options.logit_scale,
            "softcap": options.softcap,
            "smoothing": options.label_smoothing or None,
            "z_weight": options.z_loss,
            "SHIFT": options.shift,
        }

    def for_results(self) -> Arguments:
        """Arguments of kernels that write losses."""
        return {"loss_ptr": self.loss_N, "prediction_ptr": self.prediction_N}

    def for_gradient(self) -> Arguments:
        """Arguments of kernels that write a gradient."""
        stride = 0 if self.scale is None or self.scale.numel() == 1 else 1
        return {"scale_ptr": self.scale, "scale_stride": stride}
