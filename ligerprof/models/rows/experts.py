"""Decoders whose MLPs are mixtures of experts, also with latent attention."""

from dataclasses import replace

from ligerprof.models.architecture import (
    Architecture,
    Attention,
    LayerNorms,
    Linear,
    Mlp,
    NormWeight,
    RawWeight,
    Rotary,
)
from ligerprof.models.config_keys import LayerChoice, Number, SlidingWindow, SparseLayers
from ligerprof.models.mixers import BALANCING_LOSS, Experts
from ligerprof.models.rows.parts import (
    CONFIGURED_ATTENTION,
    QWEN_WINDOW,
    TWO_NORMS,
    Bias,
    attention_tensors,
    gated_tensors,
    head_norms,
    norm_tensors,
    periodic_window,
)

ROUTER = RawWeight(name="mlp.gate", parameter="weight", shape=(("experts",), ("hidden",)))
GATES = RawWeight(name="mlp.experts", parameter="gate_up_proj", shape=(("experts",), ("expert", "expert"), ("hidden",)))
DOWN = RawWeight(name="mlp.experts", parameter="down_proj", shape=(("experts",), ("hidden",), ("expert",)))
SHARED_SIZE = "shared_expert_intermediate_size"
_QWEN_LAYERS = SparseLayers(every=("decoder_sparse_step", 1), dense="mlp_only_layers")


def shared_expert(name: str, *, bias: Bias = False) -> tuple[Linear, ...]:
    """The gated MLP that all tokens share."""
    return (
        Linear(name=f"mlp.{name}.gate_proj", inputs="hidden", outputs=("shared",), bias=bias),
        Linear(name=f"mlp.{name}.up_proj", inputs="hidden", outputs=("shared",), bias=bias),
        Linear(name=f"mlp.{name}.down_proj", inputs="shared", outputs=("hidden",), bias=bias),
    )


def only_sparse(*tensors: Linear | RawWeight) -> tuple[Linear | RawWeight, ...]:
    """The same in layers with experts only."""
    return tuple(replace(item, sparse=True) for item in tensors)


_WIDE_NORMS = (NormWeight(name="self_attn.q_norm", width="query"), NormWeight(name="self_attn.k_norm", width="key"))

SIGMOID_EXPERTS = Experts(
    count="n_routed_experts",
    width="moe_intermediate_size",
    adapted_by_name=True,
    shared="moe_intermediate_size",
    shared_times="n_shared_experts",
    layers=SparseLayers(first=("first_k_dense_replace", 1)),
)

_GRANITE_EXPERTS = tuple(
    RawWeight(name=f"block_sparse_moe.{name}", parameter=item.parameter, shape=item.shape)
    for name, item in (("router", ROUTER), ("experts", GATES), ("experts", DOWN))
)
_GRANITE = Architecture(
    model_type="granitemoe",
    class_prefix="GraniteMoe",
    defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
    tensors=(*CONFIGURED_ATTENTION, *TWO_NORMS, *_GRANITE_EXPERTS),
    mlp=Mlp(
        name="block_sparse_moe",
        experts=Experts(count="num_local_experts", switches={}),
    ),
    layer_norms=LayerNorms(scales_sublayers="residual_multiplier"),
    scales_embedding="decoder",
    logit_divisor="logits_scaling",
    auxiliary_loss=BALANCING_LOSS,
)
GRANITE_SHARED_EXPERTS = Experts(
    count="num_local_experts",
    switches={},
    shared="shared_intermediate_size",
)
GRANITE_SHARED = replace(
    _GRANITE,
    model_type="granitemoeshared",
    class_prefix="GraniteMoeShared",
    defaults={**_GRANITE.defaults, "shared_intermediate_size": 0},
    tensors=(
        *CONFIGURED_ATTENTION,
        *TWO_NORMS,
        *only_sparse(*_GRANITE_EXPERTS),
        Linear(name="shared_mlp.input_linear", inputs="hidden", outputs=("shared", "shared")),
        Linear(name="shared_mlp.output_linear", inputs="shared", outputs=("hidden",)),
    ),
    mlp=replace(
        _GRANITE.mlp,
        inputs=("input_linear",),
        down="output_linear",
        activation="activation",
        experts=GRANITE_SHARED_EXPERTS,
    ),
    layer_norms=None,
)

EXPERT_ROWS = (
    Architecture(
        model_type="mixtral",
        peft_targets=("q_proj", "v_proj"),
        defaults={"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
        aliases={"num_experts": "num_local_experts"},
        tensors=(*attention_tensors(), ROUTER, GATES, DOWN, *TWO_NORMS),
        attention=Attention(window=SlidingWindow()),
        mlp=Mlp(
            experts=Experts(
                count="num_local_experts",
                switches={},
                noise="router_jitter_noise",
            )
        ),
        auxiliary_loss=BALANCING_LOSS,
    ),
    Architecture(
        model_type="qwen3_moe",
        defaults={"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        aliases={"num_local_experts": "num_experts"},
        tensors=(
            *CONFIGURED_ATTENTION,
            *head_norms(),
            *gated_tensors(sparse=False),
            *only_sparse(GATES, DOWN, ROUTER),
            *TWO_NORMS,
        ),
        attention=Attention(
            qk_norms=("q_norm", "k_norm"), window=SlidingWindow(default=4096, switch="use_sliding_window")
        ),
        mlp=Mlp(experts=Experts(width="moe_intermediate_size", adapted_by_name=True, layers=_QWEN_LAYERS)),
        auxiliary_loss=BALANCING_LOSS,
    ),
    Architecture(
        model_type="qwen2_moe",
        defaults={
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "qkv_bias": True,
        },
        tensors=(
            *attention_tensors(qkv_bias="qkv_bias"),
            *gated_tensors(sparse=False),
            *only_sparse(ROUTER, GATES, DOWN, *shared_expert("shared_expert")),
            *only_sparse(Linear(name="mlp.shared_expert_gate", inputs="hidden", outputs=("one",))),
            *TWO_NORMS,
        ),
        # every other layer has a window
        not_estimated=("use_sliding_window",),
        attention=Attention(window=QWEN_WINDOW),
        mlp=Mlp(experts=Experts(width="moe_intermediate_size", shared=SHARED_SIZE, layers=_QWEN_LAYERS)),
        auxiliary_loss=BALANCING_LOSS,
    ),
    Architecture(
        model_type="glm4_moe",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "n_shared_experts": 1,
            "partial_rotary_factor": 0.5,
            "norm_topk_prob": True,
        },
        aliases={"num_local_experts": "n_routed_experts"},
        tensors=(
            *attention_tensors(qkv_bias="attention_bias"),
            *(replace(item, when="use_qk_norm") for item in head_norms()),
            *gated_tensors(sparse=False),
            *only_sparse(GATES, DOWN, ROUTER, *shared_expert("shared_experts")),
            *TWO_NORMS,
        ),
        attention=Attention(qk_norms=("q_norm", "k_norm"), rotary=Rotary(share="partial_rotary_factor")),
        mlp=Mlp(experts=SIGMOID_EXPERTS),
    ),
    Architecture(
        model_type="ernie4_5_moe",
        class_prefix="Ernie4_5_Moe",
        defaults={
            "num_key_value_heads": 4,
            "moe_num_experts": 64,
            "moe_k": 6,
            "moe_intermediate_size": 1536,
            "moe_num_shared_experts": 2,
            "tie_word_embeddings": True,
        },
        aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
        tensors=(
            *attention_tensors(qkv_bias="use_bias", out_bias="use_bias"),
            *gated_tensors(bias="use_bias", sparse=False),
            *only_sparse(
                replace(ROUTER, fp32=True),
                RawWeight(
                    name="mlp.gate.moe_statics",
                    parameter="e_score_correction_bias",
                    shape=(("one",), ("experts",)),
                    fp32=True,
                    trained=False,
                ),
                GATES,
                DOWN,
                *shared_expert("shared_experts", bias="use_bias"),
            ),
            *TWO_NORMS,
        ),
        head_bias="use_bias",
        attention=Attention(rotary=Rotary(other=True), dropout=Number(key="no_dropout")),
        mlp=Mlp(
            experts=Experts(
                count="moe_num_experts",
                chosen="moe_k",
                width="moe_intermediate_size",
                switches={},
                shared="moe_intermediate_size",
                shared_times="moe_num_shared_experts",
                adapted_by_name=True,
                layers=SparseLayers(
                    first=("moe_layer_start_index", 1),
                    last=("moe_layer_end_index", -1),
                    every=("moe_layer_interval", 1),
                ),
            )
        ),
        auxiliary_loss=BALANCING_LOSS,
    ),
    Architecture(
        model_type="hunyuan_v1_moe",
        class_prefix="HunYuanMoEV1",
        aliases={"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"},
        tensors=(
            *CONFIGURED_ATTENTION,
            *head_norms("query_layernorm", "key_layernorm"),
            RawWeight(name="mlp.gate.wg", parameter="weight", shape=ROUTER.shape, fp32=True),
            GATES,
            DOWN,
            *shared_expert("shared_mlp"),
            *TWO_NORMS,
        ),
        attention=Attention(qk_norms=("query_layernorm", "key_layernorm"), norms_apart=True),
        mlp=Mlp(
            experts=Experts(
                chosen="moe_topk",
                switches={},
                shared="intermediate_size",
                adapted_by_name=True,
            )
        ),
    ),
    Architecture(
        model_type="gpt_oss",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "attention_bias": True,
        },
        aliases={"num_experts": "num_local_experts"},
        tensors=(
            RawWeight(name="self_attn", parameter="sinks", shape=(("heads",),)),
            *CONFIGURED_ATTENTION,
            RawWeight(name="mlp.router", parameter="weight", shape=ROUTER.shape),
            RawWeight(name="mlp.router", parameter="bias", shape=(("experts",),)),
            RawWeight(name="mlp.experts", parameter="gate_up_proj", shape=(("experts",), ("hidden",), ("expert",) * 2)),
            RawWeight(name="mlp.experts", parameter="gate_up_proj_bias", shape=(("experts",), ("expert",) * 2)),
            RawWeight(name="mlp.experts", parameter="down_proj", shape=(("experts",), ("expert",), ("hidden",))),
            RawWeight(name="mlp.experts", parameter="down_proj_bias", shape=(("experts",), ("hidden",))),
            *TWO_NORMS,
        ),
        attention=Attention(rotary=Rotary(other=True), window=periodic_window(2, default=128), sinks=True),
        mlp=Mlp(
            gate=None,
            experts=Experts(
                count="num_local_experts",
                switches={},
            ),
        ),
        auxiliary_loss=BALANCING_LOSS,
    ),
    _GRANITE,
    GRANITE_SHARED,
    Architecture(
        model_type="olmoe",
        defaults={"num_experts": 64, "num_experts_per_tok": 8},
        aliases={"num_local_experts": "num_experts"},
        tensors=(*CONFIGURED_ATTENTION, *_WIDE_NORMS, ROUTER, GATES, DOWN, *TWO_NORMS),
        not_estimated=(BALANCING_LOSS, "clip_qkv"),
        attention=Attention(qk_norms=("q_norm", "k_norm")),
        mlp=Mlp(experts=Experts()),
        auxiliary_loss=BALANCING_LOSS,
    ),
    Architecture(
        model_type="flex_olmo",
        defaults={"num_experts": 7, "num_experts_per_tok": 5},
        aliases={"num_local_experts": "num_experts"},
        tensors=(
            *CONFIGURED_ATTENTION,
            *_WIDE_NORMS,
            ROUTER,
            GATES,
            DOWN,
            *norm_tensors("post_attention_layernorm", "post_feedforward_layernorm"),
        ),
        attention=Attention(qk_norms=("q_norm", "k_norm")),
        mlp=Mlp(experts=Experts()),
        layer_norms=None,
        auxiliary_loss=BALANCING_LOSS,
    ),
)


_ATTENTION = (
    Linear(name="self_attn.q_proj", inputs="hidden", outputs=("direct query",)),
    Linear(name="self_attn.q_a_proj", inputs="hidden", outputs=("query rank",), bias="attention_bias"),
    NormWeight(name="self_attn.q_a_layernorm", width="query rank"),
    Linear(name="self_attn.q_b_proj", inputs="query rank", outputs=("latent query",)),
    Linear(name="self_attn.kv_a_proj_with_mqa", inputs="hidden", outputs=("key rank rotated",), bias="attention_bias"),
    NormWeight(name="self_attn.kv_a_layernorm", width="key rank"),
    Linear(name="self_attn.kv_b_proj", inputs="key rank", outputs=("key and value",)),
    Linear(name="self_attn.o_proj", inputs="attended", outputs=("hidden",), bias="attention_bias"),
)

_V3 = Architecture(
    model_type="deepseek_v3",
    defaults={
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "norm_topk_prob": True,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_group": 8,
        "rope_interleave": True,
    },
    aliases={"num_local_experts": "n_routed_experts"},
    tensors=(
        *_ATTENTION,
        *gated_tensors(sparse=False),
        *only_sparse(GATES, DOWN, ROUTER, *shared_expert("shared_experts")),
        *TWO_NORMS,
    ),
    switches={"rope_interleave": True},
    attention=Attention(grouped=False, latent=True, rotary=Rotary(other=True)),
    mlp=Mlp(experts=replace(SIGMOID_EXPERTS, layers=SparseLayers(first=("first_k_dense_replace", 3)))),
)

LATENT_ROWS = (
    _V3,
    replace(
        _V3,
        model_type="glm4_moe_lite",
        defaults={
            **_V3.defaults,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
        },
        mlp=Mlp(experts=replace(SIGMOID_EXPERTS, layers=SparseLayers(first=(None, 1), kinds="mlp_layer_types"))),
    ),
    replace(
        _V3,
        model_type="youtu",
        defaults={**_V3.defaults, "tie_word_embeddings": True},
        aliases={},
        tensors=(*_ATTENTION, *gated_tensors(), *TWO_NORMS),
        not_estimated=(),
        mlp=Mlp(),
    ),
    Architecture(
        model_type="deepseek_v2",
        defaults={
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "topk_method": "greedy",
        },
        aliases={"num_experts": "n_routed_experts"},
        tensors=(
            *_ATTENTION,
            *gated_tensors(bias="mlp_bias", sparse=False),
            *only_sparse(GATES, DOWN, ROUTER, *shared_expert("shared_experts", bias="mlp_bias")),
            *TWO_NORMS,
        ),
        attention=Attention(grouped=False, latent=True, rotary=Rotary(other=True)),
        mlp=Mlp(
            experts=replace(
                SIGMOID_EXPERTS,
                switches={"topk_method": "group_limited_greedy"},
                layers=SparseLayers(first=("first_k_dense_replace", 0)),
            )
        ),
    ),
)


_GATES = RawWeight(
    name="feed_forward.experts", parameter="gate_up_proj", shape=(("experts",), ("hidden",), ("expert", "expert"))
)
_DOWN = RawWeight(name="feed_forward.experts", parameter="down_proj", shape=(("experts",), ("expert",), ("hidden",)))

BATCHED_ROWS = (
    Architecture(
        model_type="llama4_text",
        modeling="llama4",
        defaults={
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "attention_chunk_size": 8192,
            "use_qk_norm": True,
            "attn_temperature_tuning": True,
        },
        tensors=(
            *CONFIGURED_ATTENTION,
            *only_sparse(
                _GATES,
                _DOWN,
                # a linear layer with two results, which peft cannot adapt
                RawWeight(name="feed_forward.router", parameter="weight", shape=(("experts",), ("hidden",))),
                *(
                    replace(item, name=f"feed_forward.{item.name.removeprefix('mlp.')}")
                    for item in shared_expert("shared_expert")
                ),
            ),
            *(
                replace(item, name=f"feed_forward.{item.name.removeprefix('mlp.')}")
                for item in gated_tensors(sparse=False)
            ),
            *TWO_NORMS,
        ),
        switches={"use_qk_norm": True, "attn_temperature_tuning": True},
        attention=Attention(
            rotary=Rotary(
                other=True,
                layers=LayerChoice(key="no_rope_layers", chosen=1, period=4, period_key="no_rope_layer_interval"),
            ),
            window=SlidingWindow(
                key="attention_chunk_size",
                layers=LayerChoice(
                    chosen="chunked_attention",
                    instead=("no_rope_layers", 1),
                    period=4,
                    period_key="no_rope_layer_interval",
                ),
            ),
        ),
        mlp=Mlp(
            name="feed_forward",
            activation="activation_fn",
            width="intermediate_size_mlp",
            experts=Experts(
                count="num_local_experts",
                switches={},
                multiplies_all=True,
                shared="intermediate_size",
                layers=SparseLayers(every=("interleave_moe_layer_step", 1), listed="moe_layers"),
            ),
        ),
        layer_norms=None,
    ),
)


_QK_NORMS = ("q_norm", "k_norm")
_EXPERTS = only_sparse(GATES, DOWN, ROUTER, *shared_expert("shared_experts"))
_NUMBERS = {"n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "norm_topk_prob": True}

_ONE_SHARED = replace(SIGMOID_EXPERTS, count="num_experts", shared_times="num_shared_experts")

_QWEN3_MOE = next(row for row in EXPERT_ROWS if row.model_type == "qwen3_moe")
_MELLUM = {"head_dim": 128, "num_experts": 64, "moe_intermediate_size": 896, "norm_topk_prob": True}
_LISTED = SparseLayers(kinds="mlp_layer_types")

SIGMOID_ROWS = (
    Architecture(
        model_type="dots1",
        defaults={"norm_topk_prob": False},
        aliases={"num_local_experts": "n_routed_experts"},
        tensors=(*CONFIGURED_ATTENTION, *head_norms(), *gated_tensors(sparse=False), *_EXPERTS, *TWO_NORMS),
        attention=Attention(
            qk_norms=_QK_NORMS,
            window=SlidingWindow(default=4096, layers=LayerChoice(from_layer=("max_window_layers", 62))),
        ),
        mlp=Mlp(experts=replace(SIGMOID_EXPERTS, layers=SparseLayers(first=("first_k_dense_replace", 0)))),
    ),
    Architecture(
        model_type="solar_open",
        defaults={**_NUMBERS, "num_key_value_heads": 8, "head_dim": 128, "moe_intermediate_size": 1280},
        aliases={"num_local_experts": "n_routed_experts"},
        tensors=(*attention_tensors(qkv_bias="attention_bias"), *_EXPERTS, *TWO_NORMS),
        mlp=Mlp(experts=replace(SIGMOID_EXPERTS, layers=None), width="moe_intermediate_size"),
    ),
    Architecture(
        model_type="exaone_moe",
        defaults={
            "num_key_value_heads": 32,
            "num_experts": 64,
            "num_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1024,
            "norm_topk_prob": True,
        },
        tensors=(*attention_tensors(), *head_norms(), *gated_tensors(sparse=False), *_EXPERTS, *TWO_NORMS),
        attention=Attention(
            qk_norms=_QK_NORMS,
            norms_apart=True,
            rotary=Rotary(only_with_window="unless off"),
            window=periodic_window(4, key="sliding_window_pattern"),
        ),
        mlp=Mlp(
            experts=replace(
                _ONE_SHARED, layers=SparseLayers(first=("first_k_dense_replace", 1), kinds="mlp_layer_types")
            )
        ),
    ),
    Architecture(
        model_type="hy_v3",
        class_prefix="HYV3",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_experts": 192,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1536,
            "num_shared_experts": 1,
        },
        tensors=(
            *CONFIGURED_ATTENTION,
            *head_norms(),
            *gated_tensors(bias="mlp_bias", sparse=False),
            *only_sparse(ROUTER, GATES, DOWN, *shared_expert("shared_experts", bias="mlp_bias")),
            *TWO_NORMS,
        ),
        attention=Attention(qk_norms=_QK_NORMS, norms_apart=True),
        mlp=Mlp(
            experts=replace(
                _ONE_SHARED,
                switches={"enable_moe_fp32_combine": True},
                layers=SparseLayers(first=(None, 1), kinds="mlp_layer_types"),
            )
        ),
    ),
    replace(
        _QWEN3_MOE,
        model_type="mellum",
        defaults={**_QWEN3_MOE.defaults, **_MELLUM},
        attention=replace(
            _QWEN3_MOE.attention,
            # without a list of kinds, no layer has a window
            window=SlidingWindow(default=1024, layers=LayerChoice(from_layer=("num_hidden_layers", 0))),
        ),
        mlp=Mlp(experts=Experts(width="moe_intermediate_size", adapted_by_name=True, layers=_LISTED)),
    ),
    Architecture(
        model_type="kolibri1",
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 384,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        tensors=(
            *attention_tensors(),
            *head_norms(),
            *_EXPERTS,
            *norm_tensors("input_layernorm", "post_attention_layernorm"),
            *norm_tensors("post_self_attn_layernorm", "post_mlp_layernorm"),
        ),
        attention=Attention(
            qk_norms=_QK_NORMS,
            norms_apart=True,
            rotary=Rotary(only_with_window="unless off"),
            window=periodic_window(5, default=513),
        ),
        mlp=Mlp(
            width="moe_intermediate_size",
            experts=Experts(width="moe_intermediate_size", shared=SHARED_SIZE),
        ),
        layer_norms=LayerNorms(after_attention=("post_self_attn_layernorm",), after_mlp=("post_mlp_layernorm",)),
    ),
    Architecture(
        model_type="minimax_m2",
        class_prefix="MiniMaxM2",
        defaults={"num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 256, "num_experts_per_tok": 8},
        aliases={"num_experts": "num_local_experts"},
        tensors=(
            *attention_tensors(),
            NormWeight(name="self_attn.q_norm", width="query"),
            NormWeight(name="self_attn.k_norm", width="key"),
            ROUTER,
            GATES,
            DOWN,
            *TWO_NORMS,
        ),
        attention=Attention(qk_norms=_QK_NORMS, rotary=Rotary(share="partial_rotary_factor")),
        mlp=Mlp(
            experts=Experts(
                count="num_local_experts",
                switches={},
                noise="router_jitter_noise",
            )
        ),
        auxiliary_loss=BALANCING_LOSS,
    ),
)
