"""TRL's loss since version 1.15, for `--loss trl-tiled`: logits in tiles of 4096 tokens and 32,768 words.

Written from `add_fused_lm_head` in trl/trainer/utils.py of TRL 1.16. Only tokens with a label are projected.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ligerprof.runs.losses.tiled_log_probabilities import TiledLogProbabilities

_IGNORED = -100


def make_forward(labelled_tokens: int, evaluated_tokens: int) -> Callable[..., Any]:
    """A model's forward with this loss.

    Args:
        labelled_tokens: tokens of a micro-batch whose successor has a label. TRL reads the number from the GPU.
        evaluated_tokens: the same of an evaluation batch.
    """

    def forward(self: Any, input_ids: Tensor, labels: Tensor, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        kwargs.pop("skip_logits", None)
        hidden = self.base_model(input_ids=input_ids, **kwargs)[0][:, :-1]
        following = labels[:, 1:]
        has_label = following != _IGNORED
        rows, columns = has_label.nonzero_static(size=labelled_tokens if self.training else evaluated_tokens).unbind(1)
        head, cap = self.get_output_embeddings(), getattr(self.config, "final_logit_softcapping", None)
        scored = TiledLogProbabilities.apply(  # type: ignore[no-untyped-call]
            hidden[rows, columns], head.weight, following[rows, columns], cap
        )
        log_probabilities, _, _ = (
            values.new_zeros(has_label.shape).masked_scatter(has_label, values) for values in scored
        )
        return CausalLMOutputWithPast(loss=-log_probabilities.sum() / has_label.sum().clamp(min=1))

    return forward
