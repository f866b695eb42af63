"""Decoders of Llama's shape: two norms before the sublayers, or after them, and a gated MLP."""

from dataclasses import replace

from ligerprof.models.architecture import (
    Architecture,
    Attention,
    LayerNorms,
    Mlp,
    ResidualDropout,
    Rotary,
)
from ligerprof.models.config_keys import Dropout, LayerChoice, SlidingWindow
from ligerprof.models.layer_tensors import Linear, NormWeight
from ligerprof.models.rows.parts import (
    AFTER_SUBLAYERS,
    CONFIGURED_ATTENTION,
    JOINT_SWIGLU,
    PLAIN_GATED,
    QWEN_WINDOW,
    TWO_NORMS,
    attention_tensors,
    gated_tensors,
    head_norms,
    joint_gated_tensors,
    norm_tensors,
    periodic_window,
)

_QK_NORMS = ("q_norm", "k_norm")
# neighbors rotate together, by tables that each layer makes of the decoder's
_EXPANDED = Rotary(interleaved=True, expands_tables=True)

LLAMA = Architecture(
    model_type="llama",
    class_prefix="Llama",
    tensors=(*CONFIGURED_ATTENTION, *gated_tensors(bias="mlp_bias"), *TWO_NORMS),
)

_OLMO2 = Architecture(
    model_type="olmo2",
    peft_targets=(),
    class_prefix="Olmo2",
    tensors=(
        *CONFIGURED_ATTENTION,
        NormWeight(name="self_attn.q_norm", width="query"),
        NormWeight(name="self_attn.k_norm", width="key"),
        *PLAIN_GATED,
        *norm_tensors("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    attention=Attention(qk_norms=_QK_NORMS, rotary=Rotary(fp32_tables=True)),
    layer_norms=AFTER_SUBLAYERS,
)

_GLM = Architecture(
    model_type="glm",
    peft_targets=(),
    class_prefix="Glm",
    defaults={"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5},
    tensors=(*attention_tensors(qkv_bias="attention_bias"), *joint_gated_tensors(), *TWO_NORMS),
    attention=Attention(rotary=Rotary(share="partial_rotary_factor", interleaved=True, expands_tables=True)),
    mlp=JOINT_SWIGLU,
)

_GRANITE = Architecture(
    model_type="granite",
    peft_targets=(),
    class_prefix="Granite",
    tensors=LLAMA.tensors,
    layer_norms=LayerNorms(scales_sublayers="residual_multiplier"),
    scales_embedding="decoder",
    logit_divisor="logits_scaling",
)

ROWS = (
    LLAMA,
    Architecture(
        model_type="mistral",
        class_prefix="Mistral",
        tensors=(*attention_tensors(), *PLAIN_GATED, *TWO_NORMS),
        attention=Attention(window=SlidingWindow(default=4096)),
    ),
    Architecture(
        model_type="qwen2",
        class_prefix="Qwen2",
        tensors=(*attention_tensors(qkv_bias=True), *PLAIN_GATED, *TWO_NORMS),
        attention=Attention(window=QWEN_WINDOW),
    ),
    Architecture(
        model_type="qwen3",
        class_prefix="Qwen3",
        defaults={"head_dim": 128},
        tensors=(*CONFIGURED_ATTENTION, *head_norms(), *PLAIN_GATED, *TWO_NORMS),
        attention=Attention(qk_norms=_QK_NORMS, window=QWEN_WINDOW),
    ),
    Architecture(
        model_type="phi3",
        peft_targets=(),
        class_prefix="Phi3",
        tensors=(
            Linear(name="self_attn.o_proj", inputs="query", outputs=("hidden",)),
            Linear(name="self_attn.qkv_proj", inputs="hidden", outputs=("query", "key", "key")),
            *joint_gated_tensors(),
            *TWO_NORMS,
        ),
        attention=Attention(qkv=("qkv_proj",), rotary=Rotary(share="partial_rotary_factor"), window=SlidingWindow()),
        mlp=JOINT_SWIGLU,
        residual_dropout=ResidualDropout(
            after_attention="resid_attn_dropout", after_mlp="resid_mlp_dropout", dropout=Dropout(key="resid_pdrop")
        ),
    ),
    _OLMO2,
    replace(
        _OLMO2,
        model_type="olmo3",
        class_prefix="Olmo3",
        attention=replace(
            _OLMO2.attention, rotary=Rotary(fp32_tables=True, tables_by_kind=True), window=periodic_window(4)
        ),
    ),
    Architecture(
        model_type="exaone4",
        peft_targets=(),
        class_prefix="Exaone4",
        tensors=(
            *attention_tensors(),
            *head_norms(),
            *PLAIN_GATED,
            *norm_tensors("post_attention_layernorm", "post_feedforward_layernorm"),
        ),
        attention=Attention(
            qk_norms=_QK_NORMS,
            norms_apart=True,
            rotary=Rotary(only_with_window="unless off"),
            window=periodic_window(4, key="sliding_window_pattern", makes_both=False),
        ),
        layer_norms=AFTER_SUBLAYERS,
    ),
    replace(
        LLAMA,
        model_type="internlm3",
        modeling="llama",
        peft_targets=(),
        defaults={"num_key_value_heads": 2, "head_dim": 128},
        aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
    ),
    replace(
        LLAMA,
        model_type="iquestcoder",
        modeling="llama",
        peft_targets=(),
        defaults={"num_key_value_heads": 8, "head_dim": 128},
    ),
    Architecture(
        model_type="cwm",
        peft_targets=(),
        class_prefix="Cwm",
        defaults={"num_key_value_heads": 8, "head_dim": 128},
        tensors=(*attention_tensors(), *gated_tensors(bias="mlp_bias"), *TWO_NORMS),
        attention=Attention(window=periodic_window(4, default=8192, leaves_first=True)),
    ),
    Architecture(
        model_type="ministral",
        peft_targets=(),
        class_prefix="Ministral",
        defaults={"num_key_value_heads": 8},
        tensors=(*attention_tensors(), *PLAIN_GATED, *TWO_NORMS),
        attention=Attention(window=SlidingWindow(default=4096, layers=LayerChoice(), makes_both=True)),
    ),
    Architecture(
        model_type="ministral3",
        peft_targets=(),
        class_prefix="Ministral3",
        defaults={"num_key_value_heads": 8, "head_dim": 128},
        tensors=(*attention_tensors(), *PLAIN_GATED, *TWO_NORMS),
        attention=Attention(window=SlidingWindow()),
    ),
    Architecture(
        model_type="smollm3",
        peft_targets=(),
        class_prefix="SmolLM3",
        defaults={"num_key_value_heads": 4, "tie_word_embeddings": True},
        tensors=LLAMA.tensors,
        not_estimated=("use_sliding_window",),
        attention=Attention(
            rotary=Rotary(
                layers=LayerChoice(key="no_rope_layers", chosen=1, period=4, period_key="no_rope_layer_interval")
            )
        ),
    ),
    Architecture(
        model_type="seed_oss",
        peft_targets=(),
        class_prefix="SeedOss",
        defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
        tensors=(
            *attention_tensors(qkv_bias="attention_bias", out_bias="attention_out_bias"),
            *gated_tensors(bias="mlp_bias"),
            *TWO_NORMS,
        ),
        attention=Attention(
            dropout=Dropout(key="attention_dropout", default=0.1),
            output_dropout=Dropout(key="residual_dropout", default=0.1),
        ),
        mlp=Mlp(dropout=Dropout(key="residual_dropout", default=0.1), dropout_attribute="residual_dropout"),
    ),
    Architecture(
        model_type="hunyuan_v1_dense",
        peft_targets=(),
        class_prefix="HunYuanDenseV1",
        tensors=(*CONFIGURED_ATTENTION, *head_norms("query_layernorm", "key_layernorm"), *PLAIN_GATED, *TWO_NORMS),
        attention=Attention(qk_norms=("query_layernorm", "key_layernorm"), norms_apart=True),
    ),
    Architecture(
        model_type="ernie4_5",
        peft_targets=(),
        class_prefix="Ernie4_5",
        defaults={"num_key_value_heads": 2, "head_dim": 128, "tie_word_embeddings": True},
        tensors=(
            *attention_tensors(qkv_bias="use_bias", out_bias="use_bias"),
            *gated_tensors(bias="use_bias"),
            *TWO_NORMS,
        ),
        attention=Attention(rotary=replace(_EXPANDED, fp32_tables=True), dropout=Dropout(key="no_dropout")),
    ),
    Architecture(
        model_type="helium",
        peft_targets=(),
        class_prefix="Helium",
        defaults={"head_dim": 128},
        tensors=(
            *attention_tensors(qkv_bias="attention_bias")[:3],
            Linear(name="self_attn.o_proj", inputs="hidden", outputs=("hidden",)),
            *gated_tensors(bias="mlp_bias"),
            *TWO_NORMS,
        ),
        attention=Attention(rotary=_EXPANDED),
    ),
    _GLM,
    replace(
        _GLM,
        model_type="glm4",
        class_prefix="Glm4",
        tensors=(*_GLM.tensors, *norm_tensors("post_self_attn_layernorm", "post_mlp_layernorm")),
        layer_norms=LayerNorms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
    ),
    _GRANITE,
    replace(
        _GRANITE,
        model_type="hyperclovax",
        class_prefix="HyperCLOVAX",
        defaults={"use_post_norm": True},
        tensors=(
            *LLAMA.tensors,
            NormWeight(name="post_norm1", when="use_post_norm"),
            NormWeight(name="post_norm2", when="use_post_norm"),
        ),
        layer_norms=LayerNorms(
            after_attention="post_norm1", after_mlp="post_norm2", scales_sublayers="residual_multiplier"
        ),
        logit_divisor=None,
        logit_scale="logits_scaling",
    ),
)
