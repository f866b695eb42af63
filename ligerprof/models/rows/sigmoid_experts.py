"""Decoders whose routers take the sigmoid of the logits, and whose attention is another decoder's."""

from dataclasses import replace

from ligerprof.models.architecture import Architecture, Attention, Mlp, Rotary
from ligerprof.models.config_keys import LayerChoice, SlidingWindow, SparseLayers
from ligerprof.models.layer_tensors import NormWeight
from ligerprof.models.mixtures import Experts, Scoring, SharedExpert
from ligerprof.models.rows.experts import (
    AUXILIARY,
    DOWN,
    GATES,
    ROUTER,
    SIGMOID_EXPERTS,
    only_sparse,
    shared_expert,
)
from ligerprof.models.rows.parts import (
    CONFIGURED_ATTENTION,
    TWO_NORMS,
    attention_tensors,
    gated_tensors,
    head_norms,
    periodic_window,
)

_QK_NORMS = ("q_norm", "k_norm")
_EXPERTS = only_sparse(GATES, DOWN, ROUTER, *shared_expert("shared_experts"))
_NUMBERS = {"n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "norm_topk_prob": True}

ROWS = (
    Architecture(
        model_type="dots1",
        peft_targets=(),
        class_prefix="Dots1",
        defaults={"norm_topk_prob": False},
        aliases={"num_local_experts": "n_routed_experts"},
        tensors=(*CONFIGURED_ATTENTION, *head_norms(), *gated_tensors(sparse=False), *_EXPERTS, *TWO_NORMS),
        not_estimated=(AUXILIARY,),
        attention=Attention(
            qk_norms=_QK_NORMS,
            window=SlidingWindow(default=4096, layers=LayerChoice(from_layer=("max_window_layers", 62))),
        ),
        mlp=Mlp(experts=replace(SIGMOID_EXPERTS, layers=SparseLayers(first=("first_k_dense_replace", 0)))),
    ),
    Architecture(
        model_type="solar_open",
        peft_targets=(),
        class_prefix="SolarOpen",
        defaults={**_NUMBERS, "num_key_value_heads": 8, "head_dim": 128, "moe_intermediate_size": 1280},
        aliases={"num_local_experts": "n_routed_experts"},
        tensors=(*attention_tensors(qkv_bias="attention_bias"), *_EXPERTS, *TWO_NORMS),
        not_estimated=(AUXILIARY,),
        mlp=Mlp(experts=replace(SIGMOID_EXPERTS, layers=None), width="moe_intermediate_size"),
    ),
    Architecture(
        model_type="exaone_moe",
        peft_targets=(),
        class_prefix="ExaoneMoe",
        defaults={
            "num_key_value_heads": 32,
            "num_experts": 64,
            "num_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1024,
            "norm_topk_prob": True,
        },
        tensors=(*attention_tensors(), *head_norms(), *gated_tensors(sparse=False), *_EXPERTS, *TWO_NORMS),
        not_estimated=(AUXILIARY,),
        attention=Attention(
            qk_norms=_QK_NORMS,
            norms_apart=True,
            rotary=Rotary(only_with_window="unless off"),
            window=periodic_window(4, key="sliding_window_pattern", makes_both=False),
        ),
        mlp=Mlp(
            experts=replace(
                SIGMOID_EXPERTS,
                count="num_experts",
                shared=SharedExpert(
                    width="moe_intermediate_size",
                    times="num_shared_experts",
                    name="shared_experts",
                    gate=None,
                    runs_last=True,
                ),
                layers=SparseLayers(first=("first_k_dense_replace", 1), kinds="mlp_layer_types"),
            )
        ),
    ),
    Architecture(
        model_type="minimax_m2",
        peft_targets=(),
        class_prefix="MiniMaxM2",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
        },
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
        not_estimated=(AUXILIARY,),
        attention=Attention(qk_norms=_QK_NORMS, rotary=Rotary(share="partial_rotary_factor")),
        mlp=Mlp(
            experts=Experts(
                count="num_local_experts",
                scoring=Scoring.WIDE_SIGMOID,
                normalizes=True,
                noise="router_jitter_noise",
                narrows_scores=False,
            )
        ),
        auxiliary_loss=AUXILIARY,
    ),
)
