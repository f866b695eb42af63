"""Decoders in which most layers have a gated delta net instead of attention."""

from dataclasses import replace

from ligerprof.models.architecture import Architecture, Attention, LayerNorms, Mlp, Norm, Rotary
from ligerprof.models.config_keys import SparseLayers
from ligerprof.models.delta import DeltaNet
from ligerprof.models.layer_tensors import Linear, NormWeight, RawWeight, Width
from ligerprof.models.mixtures import Experts, SharedExpert
from ligerprof.models.rows.experts import AUXILIARY, DOWN, GATES, ROUTER, only_sparse, shared_expert
from ligerprof.models.rows.parts import CONFIGURED_ATTENTION, PLAIN_GATED, TWO_NORMS, gated_tensors, head_norms

_QUERY_AND_GATE = Linear(
    name="self_attn.q_proj", inputs="hidden", outputs=("query", "query"), bias="attention_bias", recurrent=False
)
_RATES = tuple(
    RawWeight(name="linear_attn", parameter=name, shape=(("delta heads",),), recurrent=True)
    for name in ("dt_bias", "A_log")
)
_CONV = RawWeight(
    name="linear_attn.conv1d",
    parameter="weight",
    shape=(("delta key", "delta key", "delta value"), ("one",), ("kernel",)),
    recurrent=True,
)
_NORM = NormWeight(name="linear_attn.norm", width="delta head", recurrent=True)
_OUT = Linear(name="linear_attn.out_proj", inputs="delta value", outputs=("hidden",), recurrent=True)
_ATTENTION: tuple[Linear | NormWeight, ...] = (
    _QUERY_AND_GATE,
    *(replace(item, recurrent=False) for item in CONFIGURED_ATTENTION[1:]),
    *(replace(item, recurrent=False) for item in head_norms()),
)
_SHARED_GATE = Linear(name="mlp.shared_expert_gate", inputs="hidden", outputs=("one",), sparse=True)
_EXPERTS = (*only_sparse(ROUTER, GATES, DOWN, *shared_expert("shared_expert")), _SHARED_GATE)
_SIZES = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}

_NEXT = Architecture(
    model_type="qwen3_next",
    peft_targets=(),
    class_prefix="Qwen3Next",
    defaults={
        **_SIZES,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    tensors=(
        *_RATES,
        _CONV,
        Linear(
            name="linear_attn.in_proj_qkvz",
            inputs="hidden",
            outputs=("delta key", "delta key", "delta value", "delta value"),
            recurrent=True,
        ),
        Linear(name="linear_attn.in_proj_ba", inputs="hidden", outputs=("delta heads", "delta heads"), recurrent=True),
        _NORM,
        _OUT,
        *_ATTENTION,
        *gated_tensors(sparse=False),
        *_EXPERTS,
        *TWO_NORMS,
    ),
    not_estimated=(AUXILIARY,),
    norm=Norm(eps="eps", offset=1.0),
    attention=Attention(
        qk_norms=("q_norm", "k_norm"),
        rotary=Rotary(share="partial_rotary_factor"),
    ),
    delta=DeltaNet(inputs=("in_proj_qkvz", "in_proj_ba")),
    mlp=Mlp(
        experts=Experts(
            width="moe_intermediate_size",
            shared=SharedExpert(),
            adapted_by_name=True,
            layers=SparseLayers(every=("decoder_sparse_step", 1), dense="mlp_only_layers"),
        )
    ),
    layer_norms=LayerNorms(own_forward=True),
    auxiliary_loss=AUXILIARY,
)
_QUERY_KEY_VALUE: tuple[Width, ...] = ("delta key", "delta key", "delta value")
_PARTS = (
    Linear(name="linear_attn.in_proj_qkv", inputs="hidden", outputs=_QUERY_KEY_VALUE, recurrent=True),
    Linear(name="linear_attn.in_proj_z", inputs="hidden", outputs=("delta value",), recurrent=True),
    Linear(name="linear_attn.in_proj_b", inputs="hidden", outputs=("delta heads",), recurrent=True),
    Linear(name="linear_attn.in_proj_a", inputs="hidden", outputs=("delta heads",), recurrent=True),
)
_APART = DeltaNet(inputs=("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"))
_ROWED = replace(_NEXT.attention, rotary=Rotary(share="partial_rotary_factor", tables_by_row=True))

ROWS = (
    _NEXT,
    Architecture(
        model_type="qwen3_5_text",
        modeling="qwen3_5",
        peft_targets=(),
        class_prefix="Qwen3_5",
        defaults={**_SIZES, "num_key_value_heads": 4},
        tensors=(*_RATES, _CONV, _NORM, _OUT, *_PARTS, *_ATTENTION, *PLAIN_GATED, *TWO_NORMS),
        norm=_NEXT.norm,
        attention=_ROWED,
        delta=_APART,
        layer_norms=LayerNorms(own_forward=True),
    ),
    replace(
        _NEXT,
        model_type="qwen3_5_moe_text",
        modeling="qwen3_5_moe",
        class_prefix="Qwen3_5Moe",
        defaults={**_NEXT.defaults, "num_experts": 256, "num_experts_per_tok": 8},
        tensors=(*_RATES, _CONV, _NORM, _OUT, *_PARTS, *_ATTENTION, *_EXPERTS, *TWO_NORMS),
        attention=_ROWED,
        delta=_APART,
        mlp=Mlp(
            experts=Experts(width="moe_intermediate_size", normalizes=True, shared=SharedExpert(), adapted_by_name=True)
        ),
    ),
)
