"""The arguments that launches of the row kernels share.

Axes: N tokens, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ligerprof.kernels.options import LossOptions, VocabularyShard

# arguments of one launch, by the kernel's parameter names
Arguments = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossArguments:
    """Arguments shared by every launch over the tokens, regardless of which rows it processes.

    Attributes:
        labels_N: contiguous.
        loss_N: receives the losses in fp32.
        seq_len: tokens per sequence, used if the options shift.
        vocab: words of the whole vocabulary.
        words: words whose logits these are: fewer than `vocab` if that is split over ranks.
        scale: factor on the gradient of the loss, with one element or one per token; None is a factor of one.
        class_weight_sums: in fp32, the sum of the class weights and the factor on a token's z-loss; None if unused.
        prediction_N: receives the most likely word of each token, -1 if its label is ignored.
        lse_N, entropy_N, z_loss_N: receive these results in fp32.
        lse_grad_N, entropy_grad_N: gradients of these results, which are added to that of the loss.
        computes_entropy: whether the launches compute entropies, as results or for their gradient.
        shard: which words these are; None: all.
    """

    labels_N: Tensor
    loss_N: Tensor
    seq_len: int
    vocab: int
    words: int
    options: LossOptions
    scale: Tensor | None = None
    bias_V: Tensor | None = None
    class_weight_V: Tensor | None = None
    class_weight_sums: Tensor | None = None
    prediction_N: Tensor | None = None
    lse_N: Tensor | None = None
    entropy_N: Tensor | None = None
    z_loss_N: Tensor | None = None
    lse_grad_N: Tensor | None = None
    entropy_grad_N: Tensor | None = None
    computes_entropy: bool = False
    shard: VocabularyShard | None = None

    @property
    def has_long_formula(self) -> bool:
        """Whether the words need more registers than those of a plain loss."""
        options = self.options
        return (
            options.softcap is not None
            or options.label_smoothing > 0
            or self.bias_V is not None
            or self.computes_entropy
            or self.prediction_N is not None
        )

    def for_labels(self) -> Arguments:
        """Arguments of every kernel."""
        options, weight_V = self.options, self.class_weight_V
        if self.shard is not None and weight_V is not None:
            # indexed by the words of this rank; the label's may come before them
            weight_V = weight_V[self.shard.start :]
        return {
            "labels_ptr": self.labels_N,
            "bias_ptr": self.bias_V,
            "class_weight_ptr": weight_V,
            "class_weight_sums_ptr": self.class_weight_sums,
            "seq_len": self.seq_len,
            "ignore_index": options.ignore_index,
            "logit_scale": None if options.logit_scale == 1.0 else options.logit_scale,
            "softcap": options.softcap,
            "smoothing": options.label_smoothing or None,
            "z_weight": options.z_loss,
            "SHIFT": int(options.shift),
            "TOKEN_SCALING": options.token_scaling,
            "ENTROPY": self.computes_entropy,
        }

    def for_results(self) -> Arguments:
        """Arguments of kernels that write losses."""
        return {
            "loss_ptr": self.loss_N,
            "prediction_ptr": self.prediction_N,
            "lse_ptr": self.lse_N,
            "entropy_ptr": self.entropy_N,
            "z_loss_ptr": self.z_loss_N,
        }

    def for_gradient(self) -> Arguments:
        """Arguments of kernels that write a gradient."""
        stride = 0 if self.scale is None or self.scale.numel() == 1 else 1
        return {
            "scale_ptr": self.scale,
            "scale_stride": stride,
            "lse_grad_ptr": self.lse_grad_N,
            "entropy_grad_ptr": self.entropy_grad_N,
        }

    def for_words(self) -> Arguments:
        """Arguments of kernels that process a block of words."""
        return {"vocab": self.vocab, "vocab_start": None if self.shard is None else self.shard.start}
