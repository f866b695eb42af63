"""Decoders with delta nets, convolutions or Mamba-2 mixers next to or instead of attention, or residual streams."""

from dataclasses import replace

from ligerprof.models.architecture import (
    Architecture,
    Attention,
    Linear,
    Mlp,
    Norm,
    NormWeight,
    RawWeight,
    Rotary,
    Width,
)
from ligerprof.models.config_keys import AdjustedWidth, LayerChoice, Number, SparseLayers
from ligerprof.models.mixers import BALANCING_LOSS, Experts, Mixer
from ligerprof.models.rows.experts import (
    DOWN,
    GATES,
    GRANITE_SHARED,
    GRANITE_SHARED_EXPERTS,
    ROUTER,
    SHARED_SIZE,
    only_sparse,
    shared_expert,
)
from ligerprof.models.rows.parts import (
    CONFIGURED_ATTENTION,
    GEGLU,
    PLAIN_GATED,
    TWO_NORMS,
    attention_tensors,
    gated_tensors,
    head_norms,
    norm_tensors,
    periodic_window,
)

_QUERY_AND_GATE = Linear(
    name="self_attn.q_proj", inputs="hidden", outputs=("query", "query"), bias="attention_bias", recurrent=False
)
_DELTA_RATES = tuple(
    RawWeight(name="linear_attn", parameter=name, shape=(("delta heads",),), recurrent=True)
    for name in ("dt_bias", "A_log")
)
_DELTA_CONV = RawWeight(
    name="linear_attn.conv1d",
    parameter="weight",
    shape=(("delta key", "delta key", "delta value"), ("one",), ("kernel",)),
    recurrent=True,
)
_NORM = NormWeight(name="linear_attn.norm", width="delta head", recurrent=True)
_DELTA_OUT = Linear(name="linear_attn.out_proj", inputs="delta value", outputs=("hidden",), recurrent=True)
_ATTENTION: tuple[Linear | NormWeight, ...] = (
    _QUERY_AND_GATE,
    *(replace(item, recurrent=False) for item in CONFIGURED_ATTENTION[1:]),
    *(replace(item, recurrent=False) for item in head_norms()),
)
_SHARED_GATE = Linear(name="mlp.shared_expert_gate", inputs="hidden", outputs=("one",), sparse=True)
_DELTA_EXPERTS = (*only_sparse(ROUTER, GATES, DOWN, *shared_expert("shared_expert")), _SHARED_GATE)
_DELTA_SIZES = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}

_DELTA = Mixer(
    kind="delta",
    layers=LayerChoice(chosen="linear_attention", period=4, period_key="full_attention_interval"),
)

_NEXT = Architecture(
    model_type="qwen3_next",
    defaults={
        **_DELTA_SIZES,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    tensors=(
        *_DELTA_RATES,
        _DELTA_CONV,
        Linear(
            name="linear_attn.in_proj_qkvz",
            inputs="hidden",
            outputs=("delta key", "delta key", "delta value", "delta value"),
            recurrent=True,
        ),
        Linear(name="linear_attn.in_proj_ba", inputs="hidden", outputs=("delta heads", "delta heads"), recurrent=True),
        _NORM,
        _DELTA_OUT,
        *_ATTENTION,
        *gated_tensors(sparse=False),
        *_DELTA_EXPERTS,
        *TWO_NORMS,
    ),
    norm=Norm(offset=1.0),
    attention=Attention(qk_norms=("q_norm", "k_norm"), rotary=Rotary(share="partial_rotary_factor")),
    mixer=_DELTA,
    mlp=Mlp(
        experts=Experts(
            width="moe_intermediate_size",
            shared=SHARED_SIZE,
            adapted_by_name=True,
            layers=SparseLayers(every=("decoder_sparse_step", 1), dense="mlp_only_layers"),
        )
    ),
    layer_norms=None,
    auxiliary_loss=BALANCING_LOSS,
)
_QUERY_KEY_VALUE: tuple[Width, ...] = ("delta key", "delta key", "delta value")
_PARTS = (
    Linear(name="linear_attn.in_proj_qkv", inputs="hidden", outputs=_QUERY_KEY_VALUE, recurrent=True),
    Linear(name="linear_attn.in_proj_z", inputs="hidden", outputs=("delta value",), recurrent=True),
    Linear(name="linear_attn.in_proj_b", inputs="hidden", outputs=("delta heads",), recurrent=True),
    Linear(name="linear_attn.in_proj_a", inputs="hidden", outputs=("delta heads",), recurrent=True),
)

DELTA_ROWS = (
    _NEXT,
    Architecture(
        model_type="qwen3_5_text",
        modeling="qwen3_5",
        class_prefix="Qwen3_5",
        defaults={**_DELTA_SIZES, "num_key_value_heads": 4},
        tensors=(*_DELTA_RATES, _DELTA_CONV, _NORM, _DELTA_OUT, *_PARTS, *_ATTENTION, *PLAIN_GATED, *TWO_NORMS),
        norm=_NEXT.norm,
        attention=_NEXT.attention,
        mixer=_DELTA,
        layer_norms=None,
    ),
    replace(
        _NEXT,
        model_type="qwen3_5_moe_text",
        modeling="qwen3_5_moe",
        class_prefix="Qwen3_5Moe",
        defaults={**_NEXT.defaults, "num_experts": 256, "num_experts_per_tok": 8},
        tensors=(*_DELTA_RATES, _DELTA_CONV, _NORM, _DELTA_OUT, *_PARTS, *_ATTENTION, *_DELTA_EXPERTS, *TWO_NORMS),
        attention=_NEXT.attention,
        mlp=Mlp(experts=Experts(width="moe_intermediate_size", switches={}, shared=SHARED_SIZE, adapted_by_name=True)),
    ),
)


_MIXERS: tuple[Linear | NormWeight | RawWeight, ...] = (
    *(replace(item, recurrent=False) for item in attention_tensors(out="out_proj")),
    *(replace(item, recurrent=False) for item in head_norms("q_layernorm", "k_layernorm")),
    RawWeight(name="conv.conv", parameter="weight", shape=(("hidden",), ("one",), ("kernel",)), recurrent=True),
    Linear(name="conv.in_proj", inputs="hidden", outputs=("hidden",) * 3, recurrent=True),
    Linear(name="conv.out_proj", inputs="hidden", outputs=("hidden",), recurrent=True),
)
_LFM_MLP = (
    Linear(name="feed_forward.w1", inputs="hidden", outputs=("intermediate",)),
    Linear(name="feed_forward.w3", inputs="hidden", outputs=("intermediate",)),
    Linear(name="feed_forward.w2", inputs="intermediate", outputs=("hidden",)),
)
_LFM_EXPERTS = (
    replace(GATES, name="feed_forward.experts", sparse=True),
    replace(DOWN, name="feed_forward.experts", sparse=True),
    replace(ROUTER, name="feed_forward.gate", sparse=True),
)
_LFM_NORMS = norm_tensors("operator_norm", "ffn_norm")

_LFM2 = Architecture(
    model_type="lfm2",
    defaults={"num_key_value_heads": 8, "conv_L_cache": 3, "block_multiple_of": 256, "tie_word_embeddings": True},
    aliases={"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"},
    tensors=(*_MIXERS, *_LFM_MLP, *_LFM_NORMS),
    not_estimated=("conv_bias",),
    final_norm="model.embedding_norm",
    attention=Attention(qk_norms=("q_layernorm", "k_layernorm"), dropout=Number(key="no_dropout")),
    mixer=Mixer(kind="convolution", layers=LayerChoice(chosen="conv", others="full_attn_idxs")),
    mlp=Mlp(
        name="feed_forward",
        inputs=("w1", "w3"),
        down="w2",
        activation=None,
        adjusted=AdjustedWidth(
            switch="block_auto_adjust_ff_dim", factor="block_ffn_dim_multiplier", multiple="block_multiple_of"
        ),
    ),
    layer_norms=None,
)

SHORT_CONV_ROWS = (
    _LFM2,
    replace(
        _LFM2,
        model_type="lfm2_moe",
        defaults={
            "num_key_value_heads": 8,
            "conv_L_cache": 3,
            "tie_word_embeddings": True,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
            "norm_topk_prob": True,
        },
        aliases={},
        tensors=(*_MIXERS, *(replace(item, sparse=False) for item in _LFM_MLP), *_LFM_EXPERTS, *_LFM_NORMS),
        not_estimated=("conv_bias", BALANCING_LOSS),
        mlp=replace(
            _LFM2.mlp,
            adjusted=None,
            experts=Experts(
                width="moe_intermediate_size",
                switches={"norm_topk_prob": False, "use_expert_bias": True},
                layers=SparseLayers(first=("num_dense_layers", 2)),
            ),
        ),
        auxiliary_loss=BALANCING_LOSS,
    ),
)


_MAMBA_RATES = tuple(
    RawWeight(name="mamba", parameter=name, shape=(("ssm heads",),)) for name in ("dt_bias", "A_log", "D")
)
_MAMBA_CONV = (
    RawWeight(
        name="mamba.conv1d",
        parameter="weight",
        shape=(("ssm inner", "ssm states", "ssm states"), ("one",), ("kernel",)),
    ),
    RawWeight(
        name="mamba.conv1d",
        parameter="bias",
        shape=(("ssm inner", "ssm states", "ssm states"),),
        when="mamba_conv_bias",
    ),
)
_JOINT = Linear(
    name="mamba.in_proj",
    inputs="hidden",
    outputs=("ssm inner", "ssm inner", "ssm states", "ssm states", "ssm heads"),
    bias="mamba_proj_bias",
)
_MAMBA_OUT = Linear(name="mamba.out_proj", inputs="ssm inner", outputs=("hidden",), bias="projectors_bias")
_MAMBA_MLP = (
    Linear(name="feed_forward.gate_proj", inputs="hidden", outputs=("intermediate",), bias="mlp_bias"),
    Linear(name="feed_forward.up_proj", inputs="hidden", outputs=("intermediate",), bias="mlp_bias"),
    Linear(name="feed_forward.down_proj", inputs="intermediate", outputs=("hidden",), bias="mlp_bias"),
)

_MAMBA_SIZES = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
}
_STATES = Mixer(kind="states")
_MAMBA_NORMS = norm_tensors("input_layernorm", "pre_ff_layernorm")
# a mixer in some layers, attention in the others
_INSTEAD: tuple[Linear | NormWeight | RawWeight, ...] = (
    *(replace(item, recurrent=True) for item in (*_MAMBA_RATES, *_MAMBA_CONV)),
    replace(_JOINT, recurrent=True),
    NormWeight(name="mamba.norm", width="ssm inner", recurrent=True),
    replace(_MAMBA_OUT, bias="mamba_proj_bias", recurrent=True),
    *(replace(item, recurrent=False) for item in CONFIGURED_ATTENTION),
)

STATE_SPACE_ROWS = (
    Architecture(
        model_type="falcon_h1",
        defaults={**_MAMBA_SIZES, "num_key_value_heads": 8, "mamba_d_ssm": 1024},
        tensors=(*_MAMBA_MLP, *_MAMBA_RATES, *_MAMBA_CONV, _JOINT, _MAMBA_OUT, *CONFIGURED_ATTENTION, *_MAMBA_NORMS),
        not_estimated=("mamba_rms_norm",),
        final_norm="model.final_layernorm",
        mixer=replace(_STATES, adapts_out=False),
        mlp=Mlp(name="feed_forward", multipliers=("gate_multiplier", "down_multiplier")),
        layer_norms=None,
        scales_embedding="decoder",
        logit_scale="lm_head_multiplier",
    ),
    Architecture(
        model_type="bamba",
        # transformers sets the share, whatever the config says
        defaults={**_MAMBA_SIZES, "num_key_value_heads": 8, "partial_rotary_factor": 0.5},
        tensors=(*_MAMBA_MLP, *_MAMBA_NORMS, *_INSTEAD),
        final_norm="model.final_layernorm",
        attention=Attention(rotary=Rotary(share="partial_rotary_factor")),
        mixer=replace(
            _STATES,
            layers=LayerChoice(
                key="layers_block_type", chosen="linear_attention", others="attn_layer_indices", without_others=True
            ),
        ),
        mlp=Mlp(name="feed_forward"),
        layer_norms=None,
    ),
    replace(
        GRANITE_SHARED,
        model_type="granitemoehybrid",
        class_prefix="GraniteMoeHybrid",
        aliases={"layers_block_type": "layer_types"},
        defaults={**_MAMBA_SIZES, **GRANITE_SHARED.defaults, "shared_intermediate_size": 1024},
        tensors=(*GRANITE_SHARED.tensors[len(CONFIGURED_ATTENTION) :], *_INSTEAD),
        attention=Attention(rotary=Rotary(when=("position_embedding_type", "rope"))),
        mixer=replace(_STATES, layers=LayerChoice(chosen="linear_attention")),
        mlp=replace(GRANITE_SHARED.mlp, experts=replace(GRANITE_SHARED_EXPERTS, optional=True)),
        masks_documents=False,
    ),
)


STREAM_ROWS = (
    Architecture(
        model_type="gemma3n_text",
        modeling="gemma3n",
        class_prefix="Gemma3n",
        classes={"MLP": ("Gemma3nTextMLP",)},
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 256,
            "num_hidden_layers": 35,
            "tie_word_embeddings": True,
            "altup_num_inputs": 4,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262_144,
        },
        tensors=(
            *CONFIGURED_ATTENTION,
            *PLAIN_GATED,
            *(Linear(name=f"laurel.linear_{side}", inputs="hidden", outputs=("hidden",)) for side in ("left", "right")),
            Linear(name="per_layer_input_gate", inputs="hidden", outputs=("hidden",)),
            Linear(name="per_layer_projection", inputs="hidden", outputs=("hidden",)),
        ),
        attention=Attention(
            qk_norms=("q_norm", "k_norm"), rotary=Rotary(other=True), window=periodic_window(5, default=512)
        ),
        mlp=replace(GEGLU, sparsity_attribute="activation_sparsity"),
        layer_norms=None,
        streams="altup_num_inputs",
        layer_inputs=("vocab_size_per_layer_input", "hidden_size_per_layer_input"),
        scales_embedding="module",
        final_softcap=Number(key="final_logit_softcapping", default=30.0),
    ),
)
