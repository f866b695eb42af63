"""The loss of transformers 4.45, for `--loss hf-4.45`: logits in fp32, a shifted copy, cross-entropy on that.

Written from LlamaForCausalLM.forward in modeling_llama.py of v4.45.2. Together with the log-probabilities, three
tensors of batch * seq * vocab * 4 bytes are alive at once; the 16-bit logits are freed right after the cast.
"""

from typing import Any

from torch import Tensor, nn


def forward(self: Any, input_ids: Tensor, labels: Tensor, **kwargs: Any) -> Any:
    """The model's forward with this loss."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    hidden = self.base_model(input_ids=input_ids, **kwargs)[0]
    logits = _capped(self.get_output_embeddings()(hidden), self.config).float()
    shift_logits = logits[..., :-1, :].contiguous()
    shift_labels = labels[..., 1:].contiguous()
    shift_logits = shift_logits.view(-1, logits.shape[-1])
    loss = nn.CrossEntropyLoss()(shift_logits, shift_labels.view(-1))
    return CausalLMOutputWithPast(loss=loss, logits=logits)


def _capped(logits: Tensor, config: Any) -> Tensor:
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else (logits / cap).tanh() * cap
