"""Decoders whose layers have a Mamba-2 mixer, in parallel with attention or instead of it."""

from dataclasses import replace

from ligerprof.models.architecture import Architecture, Attention, LayerNorms, Mlp, Rotary
from ligerprof.models.config_keys import LayerChoice
from ligerprof.models.layer_tensors import Linear, NormWeight, RawWeight
from ligerprof.models.rows.experts import GRANITE_SHARED, GRANITE_SHARED_EXPERTS
from ligerprof.models.rows.parts import CONFIGURED_ATTENTION, norm_tensors
from ligerprof.models.state_space import StateSpace

_RATES = tuple(RawWeight(name="mamba", parameter=name, shape=(("ssm heads",),)) for name in ("dt_bias", "A_log", "D"))
_CONV = (
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
_OUT = Linear(name="mamba.out_proj", inputs="ssm inner", outputs=("hidden",), bias="projectors_bias")
_MLP = (
    Linear(name="feed_forward.gate_proj", inputs="hidden", outputs=("intermediate",), bias="mlp_bias"),
    Linear(name="feed_forward.up_proj", inputs="hidden", outputs=("intermediate",), bias="mlp_bias"),
    Linear(name="feed_forward.down_proj", inputs="intermediate", outputs=("hidden",), bias="mlp_bias"),
)

_SIZES = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
}
_NORMS = norm_tensors("input_layernorm", "pre_ff_layernorm")
# a mixer in some layers, attention in the others
_INSTEAD: tuple[Linear | NormWeight | RawWeight, ...] = (
    *(replace(item, recurrent=True) for item in (*_RATES, *_CONV)),
    replace(_JOINT, recurrent=True),
    NormWeight(name="mamba.norm", width="ssm inner", recurrent=True),
    replace(_OUT, bias="mamba_proj_bias", recurrent=True),
    *(replace(item, recurrent=False) for item in CONFIGURED_ATTENTION),
)

ROWS = (
    Architecture(
        model_type="falcon_h1",
        peft_targets=(),
        class_prefix="FalconH1",
        defaults={**_SIZES, "num_key_value_heads": 8, "mamba_d_ssm": 1024},
        tensors=(
            *_MLP,
            *_RATES,
            *_CONV,
            _JOINT,
            _OUT,
            *CONFIGURED_ATTENTION,
            *_NORMS,
        ),
        not_estimated=("mamba_rms_norm",),
        final_norm="model.final_layernorm",
        state_space=StateSpace(norm=None, adapts_out=False, scales_parts=True),
        mlp=Mlp(name="feed_forward", multipliers=("gate_multiplier", "down_multiplier")),
        layer_norms=LayerNorms(before_mlp="pre_ff_layernorm", own_forward=True),
        scales_embedding="decoder",
        logit_scale="lm_head_multiplier",
    ),
    Architecture(
        model_type="bamba",
        peft_targets=(),
        class_prefix="Bamba",
        # transformers sets the share, whatever the config says
        defaults={**_SIZES, "num_key_value_heads": 8, "partial_rotary_factor": 0.5},
        tensors=(
            *_MLP,
            *_NORMS,
            *_INSTEAD,
        ),
        final_norm="model.final_layernorm",
        attention=Attention(rotary=Rotary(share="partial_rotary_factor")),
        state_space=StateSpace(
            layers=LayerChoice(
                key="layers_block_type", chosen="linear_attention", others="attn_layer_indices", without_others=True
            )
        ),
        mlp=Mlp(name="feed_forward"),
        layer_norms=LayerNorms(before_mlp="pre_ff_layernorm", own_forward=True),
    ),
    replace(
        GRANITE_SHARED,
        model_type="granitemoehybrid",
        class_prefix="GraniteMoeHybrid",
        aliases={"layers_block_type": "layer_types"},
        defaults={**_SIZES, **GRANITE_SHARED.defaults, "shared_intermediate_size": 1024},
        tensors=(*GRANITE_SHARED.tensors[len(CONFIGURED_ATTENTION) :], *_INSTEAD),
        attention=Attention(rotary=Rotary(when=("position_embedding_type", "rope"))),
        state_space=StateSpace(layers=LayerChoice(chosen="linear_attention")),
        mlp=replace(GRANITE_SHARED.mlp, experts=replace(GRANITE_SHARED_EXPERTS, optional=True)),
        masks_documents=False,
    ),
)
