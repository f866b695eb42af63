"""Decoders whose MLPs are mixtures of experts."""

from dataclasses import replace

from ligerprof.models.architecture import (
    Architecture,
    Attention,
    Experts,
    LayerNorms,
    Linear,
    Mlp,
    Norm,
    NormWeight,
    RawWeight,
    Rotary,
    SharedExpert,
)
from ligerprof.models.config_keys import SlidingWindow
from ligerprof.models.rows.parts import (
    AFTER_SUBLAYERS,
    CONFIGURED_ATTENTION,
    QWEN_WINDOW,
    TWO_NORMS,
    attention_tensors,
    head_norms,
    norm_tensors,
)

_ROUTER = RawWeight(name="mlp.gate", parameter="weight", shape=(("experts",), ("hidden",)))
_GATES = RawWeight(
    name="mlp.experts", parameter="gate_up_proj", shape=(("experts",), ("expert", "expert"), ("hidden",))
)
_DOWN = RawWeight(name="mlp.experts", parameter="down_proj", shape=(("experts",), ("hidden",), ("expert",)))
_SHARED_EXPERT = (
    Linear(name="mlp.shared_expert.gate_proj", inputs="hidden", outputs=("shared",)),
    Linear(name="mlp.shared_expert.up_proj", inputs="hidden", outputs=("shared",)),
    Linear(name="mlp.shared_expert.down_proj", inputs="shared", outputs=("hidden",)),
    Linear(name="mlp.shared_expert_gate", inputs="hidden", outputs=("one",)),
)
_MOE_OUTPUT = "MoeCausalLMOutputWithPast"
# the balancing loss of the routers
_AUXILIARY = "output_router_logits"
_WIDE_NORMS = (
    NormWeight(name="self_attn.q_norm", width="query"),
    NormWeight(name="self_attn.k_norm", width="key"),
)

ROWS = (
    Architecture(
        model_type="mixtral",
        peft_targets=("q_proj", "v_proj"),
        class_prefix="Mixtral",
        defaults={"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
        aliases={"num_experts": "num_local_experts"},
        tensors=(*attention_tensors(), _ROUTER, _GATES, _DOWN, *TWO_NORMS),
        not_estimated=(_AUXILIARY, "router_jitter_noise"),
        attention=Attention(window=SlidingWindow()),
        mlp=Mlp(experts=Experts(count="num_local_experts", casts_logits=True, normalizes=True, narrows_scores=False)),
        auxiliary_loss=_AUXILIARY,
        output_class=_MOE_OUTPUT,
    ),
    Architecture(
        model_type="qwen3_moe",
        peft_targets=(),
        class_prefix="Qwen3Moe",
        defaults={
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        aliases={"num_local_experts": "num_experts"},
        tensors=(*CONFIGURED_ATTENTION, *head_norms(), _GATES, _DOWN, _ROUTER, *TWO_NORMS),
        not_estimated=(_AUXILIARY, "mlp_only_layers"),
        only_one=("decoder_sparse_step",),
        attention=Attention(
            qk_norms=("q_norm", "k_norm"), window=SlidingWindow(default=4096, switch="use_sliding_window")
        ),
        mlp=Mlp(experts=Experts(width="moe_intermediate_size")),
        auxiliary_loss=_AUXILIARY,
        output_class=_MOE_OUTPUT,
    ),
    Architecture(
        model_type="qwen2_moe",
        peft_targets=(),
        class_prefix="Qwen2Moe",
        defaults={
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "qkv_bias": True,
        },
        aliases={"num_local_experts": "num_experts"},
        tensors=(*attention_tensors(qkv_bias="qkv_bias"), _ROUTER, _GATES, _DOWN, *_SHARED_EXPERT, *TWO_NORMS),
        # every other layer has a window
        not_estimated=(_AUXILIARY, "mlp_only_layers", "use_sliding_window"),
        only_one=("decoder_sparse_step",),
        attention=Attention(window=replace(QWEN_WINDOW, makes_both=True)),
        mlp=Mlp(experts=Experts(width="moe_intermediate_size", shared=SharedExpert())),
        auxiliary_loss=_AUXILIARY,
        output_class=_MOE_OUTPUT,
    ),
    Architecture(
        model_type="granitemoe",
        peft_targets=(),
        class_prefix="GraniteMoe",
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
        aliases={"num_experts": "num_local_experts"},
        tensors=(
            *CONFIGURED_ATTENTION,
            *TWO_NORMS,
            *(
                RawWeight(name=f"block_sparse_moe.{name}", parameter=item.parameter, shape=item.shape)
                for name, item in (("router", _ROUTER), ("experts", _GATES), ("experts", _DOWN))
            ),
        ),
        not_estimated=(_AUXILIARY,),
        mlp=Mlp(
            name="block_sparse_moe",
            experts=Experts(count="num_local_experts", router="router", softens_chosen=True),
        ),
        layer_norms=LayerNorms(scales_sublayers="residual_multiplier"),
        scales_embedding=True,
        logit_divisor="logits_scaling",
        auxiliary_loss=_AUXILIARY,
        output_class=_MOE_OUTPUT,
    ),
    Architecture(
        model_type="olmoe",
        peft_targets=(),
        class_prefix="Olmoe",
        defaults={"num_experts": 64, "num_experts_per_tok": 8},
        aliases={"num_local_experts": "num_experts"},
        tensors=(*CONFIGURED_ATTENTION, *_WIDE_NORMS, _ROUTER, _GATES, _DOWN, *TWO_NORMS),
        not_estimated=(_AUXILIARY, "clip_qkv"),
        attention=Attention(qk_norms=("q_norm", "k_norm")),
        mlp=Mlp(experts=Experts()),
        auxiliary_loss=_AUXILIARY,
        output_class=_MOE_OUTPUT,
    ),
    Architecture(
        model_type="flex_olmo",
        peft_targets=(),
        class_prefix="FlexOlmo",
        defaults={"num_experts": 7, "num_experts_per_tok": 5},
        aliases={"num_local_experts": "num_experts"},
        tensors=(
            *CONFIGURED_ATTENTION,
            *_WIDE_NORMS,
            _ROUTER,
            _GATES,
            _DOWN,
            *norm_tensors("post_attention_layernorm", "post_feedforward_layernorm"),
        ),
        not_estimated=(_AUXILIARY,),
        norm=Norm(casts_last=True),
        attention=Attention(qk_norms=("q_norm", "k_norm"), rotary=Rotary(fp32_tables=True)),
        mlp=Mlp(experts=Experts()),
        layer_norms=AFTER_SUBLAYERS,
        auxiliary_loss=_AUXILIARY,
        output_class=_MOE_OUTPUT,
    ),
)
