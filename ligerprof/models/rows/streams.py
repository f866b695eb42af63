"""Decoders with several residual streams."""

from dataclasses import replace

from ligerprof.models.architecture import Architecture, Attention, LayerNorms, Norm, Rotary
from ligerprof.models.config_keys import Softcap
from ligerprof.models.layer_tensors import Linear, NormWeight, RawWeight
from ligerprof.models.rows.parts import CONFIGURED_ATTENTION, GEGLU, PLAIN_GATED, norm_tensors, periodic_window
from ligerprof.models.streams import Streams

_QUERY, _KEY, _VALUE, _OUT = CONFIGURED_ATTENTION
_ALTUP = (
    RawWeight(name="altup", parameter="correct_output_scale", shape=(("hidden",),)),
    RawWeight(name="altup.correction_coefs", parameter="weight", shape=(("streams",), ("streams",))),
    RawWeight(name="altup.prediction_coefs", parameter="weight", shape=(("stream pairs",), ("streams",))),
    RawWeight(name="altup.modality_router", parameter="weight", shape=(("streams",), ("hidden",))),
    NormWeight(name="altup.router_norm"),
)

ROWS = (
    Architecture(
        model_type="gemma3n_text",
        modeling="gemma3n",
        peft_targets=(),
        class_prefix="Gemma3n",
        classes={"MLP": ("Gemma3nTextMLP",)},
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 256,
            "num_hidden_layers": 35,
            "num_kv_shared_layers": 15,
            "altup_num_inputs": 4,
            "laurel_rank": 64,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262_144,
        },
        tensors=(
            _QUERY,
            NormWeight(name="self_attn.q_norm", width="head"),
            replace(_KEY, of_keys=True),
            replace(_VALUE, of_keys=True),
            NormWeight(name="self_attn.k_norm", width="head", of_keys=True),
            _OUT,
            *PLAIN_GATED,
            *norm_tensors(
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ),
            *_ALTUP,
            Linear(name="laurel.linear_left", inputs="hidden", outputs=("laurel",)),
            Linear(name="laurel.linear_right", inputs="laurel", outputs=("hidden",)),
            NormWeight(name="laurel.post_laurel_norm"),
            Linear(name="per_layer_input_gate", inputs="hidden", outputs=("layer input",)),
            Linear(name="per_layer_projection", inputs="layer input", outputs=("hidden",)),
            NormWeight(name="post_per_layer_input_norm"),
        ),
        norm=Norm(eps="eps"),
        attention=Attention(
            qk_norms=("q_norm", "k_norm"),
            rotary=Rotary(other=True, tables_by_kind=True),
            window=periodic_window(5, default=512),
        ),
        mlp=replace(GEGLU, sparsity_attribute="activation_sparsity"),
        layer_norms=LayerNorms(
            after_attention="post_attention_layernorm",
            before_mlp="pre_feedforward_layernorm",
            after_mlp="post_feedforward_layernorm",
            own_forward=True,
        ),
        streams=Streams(),
        scales_embedding="module",
        tied_by_default=True,
        final_softcap=Softcap(key="final_logit_softcapping", default=30.0),
    ),
)
