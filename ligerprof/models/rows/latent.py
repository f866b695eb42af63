"""Decoders with latent attention."""

from dataclasses import replace

from ligerprof.models.architecture import Architecture, Attention, Mlp, Rotary
from ligerprof.models.config_keys import SparseLayers
from ligerprof.models.layer_tensors import Linear, NormWeight
from ligerprof.models.mixtures import Scoring
from ligerprof.models.rows.experts import (
    AUXILIARY,
    DOWN,
    GATES,
    ROUTER,
    SIGMOID_EXPERTS,
    only_sparse,
    shared_expert,
)
from ligerprof.models.rows.parts import TWO_NORMS, gated_tensors

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
    peft_targets=(),
    class_prefix="DeepseekV3",
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
        "rope_interleave": True,
    },
    aliases={"num_local_experts": "n_routed_experts"},
    tensors=(
        *_ATTENTION,
        *gated_tensors(sparse=False),
        *only_sparse(GATES, DOWN, ROUTER, *shared_expert("shared_experts")),
        *TWO_NORMS,
    ),
    not_estimated=(AUXILIARY,),
    switches={"rope_interleave": True},
    attention=Attention(grouped=False, latent=True, rotary=Rotary(other=True)),
    mlp=Mlp(experts=replace(SIGMOID_EXPERTS, layers=SparseLayers(first=("first_k_dense_replace", 3)))),
)

ROWS = (
    _V3,
    replace(
        _V3,
        model_type="glm4_moe_lite",
        class_prefix="Glm4MoeLite",
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
        class_prefix="Youtu",
        defaults={**_V3.defaults, "tie_word_embeddings": True},
        aliases={},
        tensors=(*_ATTENTION, *gated_tensors(), *TWO_NORMS),
        not_estimated=(),
        mlp=Mlp(),
        tied_by_default=True,
    ),
    Architecture(
        model_type="deepseek_v2",
        peft_targets=(),
        class_prefix="DeepseekV2",
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
        not_estimated=(AUXILIARY,),
        attention=Attention(grouped=False, latent=True, rotary=Rotary(complex_products=True)),
        mlp=Mlp(
            experts=replace(
                SIGMOID_EXPERTS,
                scoring=Scoring.GROUPED_SOFTMAX,
                layers=SparseLayers(first=("first_k_dense_replace", 0)),
            )
        ),
    ),
)
