"""Decoders with one MLP per layer: like Llama, like Gemma, and those with LayerNorms or parallel sublayers."""

from dataclasses import replace

from ligerprof.models.architecture import (
    Architecture,
    Attention,
    LayerNorms,
    Linear,
    Mlp,
    Norm,
    NormForm,
    NormWeight,
    RawWeight,
    Rotary,
)
from ligerprof.models.config_keys import LayerChoice, Number, SlidingWindow
from ligerprof.models.mixers import BALANCING_LOSS, Experts
from ligerprof.models.rows.experts import DOWN, GATES, ROUTER
from ligerprof.models.rows.parts import (
    CONFIGURED_ATTENTION,
    GEGLU,
    GEMMA_NORM,
    JOINT_SWIGLU,
    PLAIN_GATED,
    QWEN_WINDOW,
    SQUARED_RELU,
    TWO_NORMS,
    attention_tensors,
    gated_tensors,
    head_norms,
    joint_gated_tensors,
    norm_tensors,
    periodic_window,
    plain_tensors,
)

_QK_NORMS = ("q_norm", "k_norm")
_QUERY_AND_VALUE = ("q_proj", "v_proj")
# neighbors rotate together
_NEIGHBORS = Rotary(other=True)

LLAMA = Architecture(
    model_type="llama",
    peft_targets=_QUERY_AND_VALUE,
    tensors=(*CONFIGURED_ATTENTION, *gated_tensors(bias="mlp_bias"), *TWO_NORMS),
)

_OLMO2 = Architecture(
    model_type="olmo2",
    tensors=(
        *CONFIGURED_ATTENTION,
        NormWeight(name="self_attn.q_norm", width="query"),
        NormWeight(name="self_attn.k_norm", width="key"),
        *PLAIN_GATED,
        *norm_tensors("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    attention=Attention(qk_norms=_QK_NORMS),
    layer_norms=None,
)

_GLM = Architecture(
    model_type="glm",
    defaults={"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5},
    tensors=(*attention_tensors(qkv_bias="attention_bias"), *joint_gated_tensors(), *TWO_NORMS),
    attention=Attention(rotary=Rotary(share="partial_rotary_factor", other=True)),
    mlp=JOINT_SWIGLU,
)

_GRANITE = Architecture(
    model_type="granite",
    tensors=LLAMA.tensors,
    layer_norms=LayerNorms(scales_sublayers="residual_multiplier"),
    scales_embedding="decoder",
    logit_divisor="logits_scaling",
)

LLAMA_ROWS = (
    LLAMA,
    Architecture(
        model_type="mistral",
        peft_targets=_QUERY_AND_VALUE,
        tensors=(*attention_tensors(), *PLAIN_GATED, *TWO_NORMS),
        attention=Attention(window=SlidingWindow(default=4096)),
    ),
    Architecture(
        model_type="qwen2",
        peft_targets=_QUERY_AND_VALUE,
        tensors=(*attention_tensors(qkv_bias=True), *PLAIN_GATED, *TWO_NORMS),
        attention=Attention(window=QWEN_WINDOW),
    ),
    Architecture(
        model_type="qwen3",
        peft_targets=_QUERY_AND_VALUE,
        defaults={"head_dim": 128},
        tensors=(*CONFIGURED_ATTENTION, *head_norms(), *PLAIN_GATED, *TWO_NORMS),
        attention=Attention(qk_norms=_QK_NORMS, window=QWEN_WINDOW),
    ),
    Architecture(
        model_type="phi3",
        tensors=(
            Linear(name="self_attn.o_proj", inputs="query", outputs=("hidden",)),
            Linear(name="self_attn.qkv_proj", inputs="hidden", outputs=("query", "key", "key")),
            *joint_gated_tensors(),
            *TWO_NORMS,
        ),
        attention=Attention(qkv=("qkv_proj",), rotary=Rotary(share="partial_rotary_factor"), window=SlidingWindow()),
        mlp=JOINT_SWIGLU,
        layer_norms=LayerNorms(after_attention=("resid_attn_dropout",), after_mlp=("resid_mlp_dropout",)),
    ),
    _OLMO2,
    replace(_OLMO2, model_type="olmo3", attention=replace(_OLMO2.attention, window=periodic_window(4))),
    Architecture(
        model_type="exaone4",
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
            window=periodic_window(4, key="sliding_window_pattern"),
        ),
        layer_norms=None,
    ),
    replace(
        LLAMA,
        model_type="internlm3",
        peft_targets=(),
        class_prefix="Llama",
        modeling="llama",
        defaults={"num_key_value_heads": 2, "head_dim": 128},
        aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
    ),
    replace(
        LLAMA,
        model_type="iquestcoder",
        peft_targets=(),
        class_prefix="Llama",
        modeling="llama",
        defaults={"num_key_value_heads": 8, "head_dim": 128},
    ),
    Architecture(
        model_type="cwm",
        defaults={"num_key_value_heads": 8, "head_dim": 128},
        tensors=(*attention_tensors(), *gated_tensors(bias="mlp_bias"), *TWO_NORMS),
        attention=Attention(window=periodic_window(4, default=8192, leaves_first=True)),
    ),
    Architecture(
        model_type="ministral",
        defaults={"num_key_value_heads": 8},
        tensors=(*attention_tensors(), *PLAIN_GATED, *TWO_NORMS),
        attention=Attention(window=SlidingWindow(default=4096, layers=LayerChoice())),
    ),
    Architecture(
        model_type="ministral3",
        defaults={"num_key_value_heads": 8, "head_dim": 128},
        tensors=(*attention_tensors(), *PLAIN_GATED, *TWO_NORMS),
        attention=Attention(window=SlidingWindow()),
    ),
    Architecture(
        model_type="smollm3",
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
        defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
        tensors=(
            *attention_tensors(qkv_bias="attention_bias", out_bias="attention_out_bias"),
            *gated_tensors(bias="mlp_bias"),
            *TWO_NORMS,
        ),
        attention=Attention(dropout=Number(key="attention_dropout", default=0.1)),
        mlp=Mlp(dropout=Number(key="residual_dropout", default=0.1), dropout_attribute="residual_dropout"),
    ),
    Architecture(
        model_type="hunyuan_v1_dense",
        class_prefix="HunYuanDenseV1",
        tensors=(*CONFIGURED_ATTENTION, *head_norms("query_layernorm", "key_layernorm"), *PLAIN_GATED, *TWO_NORMS),
        attention=Attention(qk_norms=("query_layernorm", "key_layernorm"), norms_apart=True),
    ),
    Architecture(
        model_type="ernie4_5",
        class_prefix="Ernie4_5",
        defaults={"num_key_value_heads": 2, "head_dim": 128, "tie_word_embeddings": True},
        tensors=(
            *attention_tensors(qkv_bias="use_bias", out_bias="use_bias"),
            *gated_tensors(bias="use_bias"),
            *TWO_NORMS,
        ),
        attention=Attention(rotary=Rotary(other=True), dropout=Number(key="no_dropout")),
    ),
    Architecture(
        model_type="helium",
        defaults={"head_dim": 128},
        tensors=(
            *attention_tensors(qkv_bias="attention_bias")[:3],
            Linear(name="self_attn.o_proj", inputs="hidden", outputs=("hidden",)),
            *gated_tensors(bias="mlp_bias"),
            *TWO_NORMS,
        ),
        attention=Attention(rotary=_NEIGHBORS),
    ),
    _GLM,
    replace(
        _GLM,
        model_type="glm4",
        tensors=(*_GLM.tensors, *norm_tensors("post_self_attn_layernorm", "post_mlp_layernorm")),
        layer_norms=LayerNorms(after_attention=("post_self_attn_layernorm",), after_mlp=("post_mlp_layernorm",)),
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
            after_attention=("post_norm1",), after_mlp=("post_norm2",), scales_sublayers="residual_multiplier"
        ),
        logit_divisor=None,
        logit_scale="logits_scaling",
    ),
)


_SCORE_CAP, _LOGIT_CAP = "attn_logit_softcapping", "final_logit_softcapping"
_FOUR_NORMS = (*TWO_NORMS, *norm_tensors("pre_feedforward_layernorm", "post_feedforward_layernorm"))

_GEMMA = Architecture(
    model_type="gemma",
    peft_targets=_QUERY_AND_VALUE,
    defaults={"head_dim": 256, "tie_word_embeddings": True},
    tensors=(*CONFIGURED_ATTENTION, *PLAIN_GATED, *TWO_NORMS),
    norm=GEMMA_NORM,
    mlp=replace(GEGLU, function=("hidden_act", "gelu_pytorch_tanh"), legacy_function="gelu"),
    scales_embedding="module",
)

_GEMMA_SIZES = {**_GEMMA.defaults, "num_key_value_heads": 4}
_GEMMA2 = replace(
    _GEMMA,
    model_type="gemma2",
    defaults=_GEMMA_SIZES,
    tensors=(*CONFIGURED_ATTENTION, *PLAIN_GATED, *_FOUR_NORMS),
    mlp=GEGLU,
    attention=Attention(window=periodic_window(2), softcap=Number(key=_SCORE_CAP, default=50.0)),
    layer_norms=LayerNorms(
        after_attention=("post_attention_layernorm",),
        before_mlp="pre_feedforward_layernorm",
        after_mlp=("post_feedforward_layernorm",),
    ),
    final_softcap=Number(key=_LOGIT_CAP, default=30.0),
)

GEMMA_ROWS = (
    _GEMMA,
    _GEMMA2,
    replace(
        _GEMMA2,
        model_type="gemma3_text",
        class_prefix="Gemma3",
        modeling="gemma3",
        peft_targets=_QUERY_AND_VALUE,
        defaults=_GEMMA_SIZES,
        not_estimated=("use_bidirectional_attention",),
        tensors=(*CONFIGURED_ATTENTION, *head_norms(), *PLAIN_GATED, *_FOUR_NORMS),
        attention=Attention(
            qk_norms=("q_norm", "k_norm"),
            norms_apart=True,
            # its attention keeps attn_logit_softcapping, and does not pass it on
            window=periodic_window(6, key="sliding_window_pattern"),
        ),
        final_softcap=Number(key=_LOGIT_CAP),
    ),
    replace(
        _GEMMA2,
        model_type="vaultgemma",
        peft_targets=(),
        class_prefix="VaultGemma",
        defaults=_GEMMA_SIZES,
        tensors=(*CONFIGURED_ATTENTION, *PLAIN_GATED, *norm_tensors("input_layernorm", "pre_feedforward_layernorm")),
        layer_norms=LayerNorms(before_mlp="pre_feedforward_layernorm"),
    ),
)


_LAYER_NORM = Norm(form=NormForm.LAYER)
_PARTIAL = Rotary(share="partial_rotary_factor")
_NO_DROPOUT = "no_dropout"

_COHERE = Architecture(
    model_type="cohere",
    defaults={"logit_scale": 0.0625, "tie_word_embeddings": True},
    tensors=(
        *CONFIGURED_ATTENTION,
        NormWeight(name="self_attn.q_norm", width="query", when="use_qk_norm", by_head=True),
        NormWeight(name="self_attn.k_norm", width="key", when="use_qk_norm", by_head=True),
        *PLAIN_GATED,
        *norm_tensors("input_layernorm"),
    ),
    norm=Norm(form=NormForm.CENTERED),
    attention=Attention(qk_norms=("q_norm", "k_norm"), rotary=_NEIGHBORS),
    logit_scale="logit_scale",
)

OTHER_ROWS = (
    Architecture(
        model_type="gpt2",
        class_prefix="GPT2",
        defaults={"n_positions": 1024, "tie_word_embeddings": True},
        tensors=(
            NormWeight(name="ln_1"),
            Linear(name="attn.c_attn", inputs="hidden", outputs=("hidden",) * 3, bias=True, transposed=True),
            Linear(name="attn.c_proj", inputs="hidden", outputs=("hidden",), bias=True, transposed=True),
            NormWeight(name="ln_2"),
            Linear(name="mlp.c_fc", inputs="hidden", outputs=("intermediate",), bias=True, transposed=True),
            Linear(name="mlp.c_proj", inputs="intermediate", outputs=("hidden",), bias=True, transposed=True),
        ),
        embedding="transformer.wte",
        positions="transformer.wpe",
        layers="transformer.h",
        final_norm="transformer.ln_f",
        norm=_LAYER_NORM,
        attention=Attention(
            name="attn",
            qkv=("c_attn",),
            grouped=False,
            splits_hidden=True,
            rotary=None,
            dropout=Number(key="attn_pdrop", default=0.1),
        ),
        mlp=Mlp(
            gate=None,
            inputs=("c_fc",),
            down="c_proj",
            function=("activation_function", "gelu_new"),
            dropout=Number(key="resid_pdrop", default=0.1),
        ),
        mask_by_position=True,
    ),
    Architecture(
        model_type="arcee",
        tensors=(*CONFIGURED_ATTENTION, *plain_tensors("up_proj", "down_proj", bias="mlp_bias"), *TWO_NORMS),
        mlp=SQUARED_RELU,
    ),
    Architecture(
        model_type="apertus",
        tensors=(
            *CONFIGURED_ATTENTION,
            *head_norms(),
            *plain_tensors("up_proj", "down_proj", bias=False),
            *(
                RawWeight(name="mlp.act_fn", parameter=name, shape=(("one",),), activation="xielu")
                for name in ("alpha_p", "alpha_n")
            ),
            *norm_tensors("attention_layernorm", "feedforward_layernorm"),
        ),
        # its code rotates whole heads, whatever share its tables are for
        only_one=("partial_rotary_factor",),
        attention=Attention(qk_norms=("q_norm", "k_norm"), norms_apart=True),
        mlp=Mlp(gate=None, inputs=("up_proj",), function=("hidden_act", "xielu")),
        layer_norms=LayerNorms(before_attention="attention_layernorm", before_mlp="feedforward_layernorm"),
    ),
    Architecture(
        model_type="jais2",
        defaults={"attention_bias": True, "mlp_bias": True},
        tensors=(*CONFIGURED_ATTENTION, *plain_tensors("up_proj", "down_proj", bias="mlp_bias"), *TWO_NORMS),
        norm=_LAYER_NORM,
        mlp=SQUARED_RELU,
    ),
    Architecture(
        model_type="nemotron",
        defaults={"partial_rotary_factor": 0.5},
        tensors=(*CONFIGURED_ATTENTION, *plain_tensors("up_proj", "down_proj", bias="mlp_bias"), *TWO_NORMS),
        norm=Norm(form=NormForm.LAYER_PLUS_ONE),
        attention=Attention(rotary=_PARTIAL),
        mlp=SQUARED_RELU,
    ),
    Architecture(
        model_type="starcoder2",
        defaults={"num_key_value_heads": 2, "use_bias": True, "tie_word_embeddings": True},
        tensors=(
            *attention_tensors(qkv_bias="use_bias", out_bias="use_bias"),
            *plain_tensors("c_fc", "c_proj", bias="use_bias"),
            *TWO_NORMS,
        ),
        norm=_LAYER_NORM,
        attention=Attention(window=SlidingWindow()),
        mlp=Mlp(
            gate=None,
            inputs=("c_fc",),
            down="c_proj",
            function=("hidden_act", "gelu_pytorch_tanh"),
            dropout=Number(key="residual_dropout"),
        ),
    ),
    Architecture(
        model_type="stablelm",
        peft_targets=_QUERY_AND_VALUE,
        class_prefix="StableLm",
        defaults={"num_key_value_heads": 32, "partial_rotary_factor": 0.25},
        tensors=(
            *attention_tensors(qkv_bias="use_qkv_bias"),
            *PLAIN_GATED,
            NormWeight(name="input_layernorm"),
            NormWeight(name="post_attention_layernorm", unless="use_parallel_residual"),
        ),
        not_estimated=("qk_layernorm",),
        switches={"use_parallel_residual": False},
        norm=_LAYER_NORM,
        attention=Attention(splits_hidden=True, rotary=_PARTIAL),
    ),
    Architecture(
        model_type="olmo",
        tensors=(*CONFIGURED_ATTENTION, *PLAIN_GATED, *TWO_NORMS),
        not_estimated=("clip_qkv",),
        norm=Norm(form=NormForm.LAYER_BARE),
    ),
    Architecture(
        model_type="phi",
        peft_targets=("q_proj", "v_proj", "fc1", "fc2"),
        defaults={"partial_rotary_factor": 0.5},
        tensors=(
            *attention_tensors(qkv_bias=True, out_bias=True, out="dense"),
            *plain_tensors("fc1", "fc2", bias=True),
            *norm_tensors("input_layernorm"),
        ),
        not_estimated=("qk_layernorm",),
        final_norm="model.final_layernorm",
        head_bias=True,
        norm=_LAYER_NORM,
        attention=Attention(rotary=_PARTIAL),
        mlp=Mlp(
            gate=None, inputs=("fc1",), down="fc2", activation="activation_fn", function=("hidden_act", "gelu_new")
        ),
    ),
    Architecture(
        model_type="phimoe",
        defaults={"num_key_value_heads": 8, "num_local_experts": 16, "num_experts_per_tok": 2},
        tensors=(
            *CONFIGURED_ATTENTION,
            RawWeight(name="mlp.router", parameter="weight", shape=ROUTER.shape),
            GATES,
            DOWN,
            *TWO_NORMS,
        ),
        head_bias="lm_head_bias",
        norm=_LAYER_NORM,
        attention=Attention(window=SlidingWindow()),
        mlp=Mlp(
            experts=Experts(
                count="num_local_experts",
                chosen=2,
                switches={},
                noise="input_jitter_noise",
            )
        ),
        auxiliary_loss=BALANCING_LOSS,
    ),
    Architecture(
        model_type="gpt_neox",
        peft_targets=("query_key_value",),
        class_prefix="GPTNeoX",
        switches={"use_parallel_residual": True},
        defaults={
            "attention_bias": True,
            "use_parallel_residual": True,
            "partial_rotary_factor": 0.25,
            "intermediate_size": 24576,
        },
        aliases={"rotary_pct": "partial_rotary_factor"},
        tensors=(
            *TWO_NORMS,
            Linear(name="attention.query_key_value", inputs="hidden", outputs=("hidden",) * 3, bias="attention_bias"),
            Linear(name="attention.dense", inputs="hidden", outputs=("hidden",), bias="attention_bias"),
            *plain_tensors("dense_h_to_4h", "dense_4h_to_h", bias=True),
        ),
        embedding="gpt_neox.embed_in",
        layers="gpt_neox.layers",
        final_norm="gpt_neox.final_layer_norm",
        norm=_LAYER_NORM,
        attention=Attention(
            name="attention", qkv=("query_key_value",), grouped=False, splits_hidden=True, rotary=_PARTIAL
        ),
        mlp=Mlp(
            gate=None,
            inputs=("dense_h_to_4h",),
            down="dense_4h_to_h",
            activation="act",
            function=("hidden_act", "gelu"),
        ),
    ),
    _COHERE,
    replace(
        _COHERE,
        model_type="cohere2",
        tensors=(*CONFIGURED_ATTENTION, *PLAIN_GATED, *norm_tensors("input_layernorm")),
        attention=Attention(
            rotary=Rotary(other=True, only_with_window="never"), window=periodic_window(4, key="sliding_window_pattern")
        ),
    ),
)
