"""Decoders that kernels can patch but the estimate does not cover: mixers other than attention, and unusual layers.

`tensors` lists only the linear layers that LoRA adapts.
"""

from ligerprof.models.architecture import (
    Architecture,
    Attention,
    LayerNorms,
    Mlp,
    Norm,
    Rotary,
)
from ligerprof.models.config_keys import Softcap
from ligerprof.models.rows.parts import attention_tensors

_OTHER_ROTATION = Rotary(other=True)

ROWS = (
    Architecture(
        model_type="gemma3n_text",
        modeling="gemma3n",
        peft_targets=(),
        class_prefix="Gemma3n",
        no_estimate="its layers predict and correct several residual streams",
        defaults={"num_key_value_heads": 2, "head_dim": 256, "num_hidden_layers": 35},
        tensors=attention_tensors(),
        norm=Norm(eps="eps", casts_last=True),
        attention=Attention(rotary=_OTHER_ROTATION),
        # most gates are thinned out before the product
        mlp=Mlp(gate=None, function=("hidden_activation", "gelu_pytorch_tanh")),
        layer_norms=LayerNorms(own_forward=True),
        scales_embedding="module",
        tied_by_default=True,
        final_softcap=Softcap(key="final_logit_softcapping", default=30.0),
    ),
)
