"""Decoders in which most layers have a short convolution instead of attention."""

from dataclasses import replace

from ligerprof.models.architecture import Architecture, Attention, LayerNorms, Mlp
from ligerprof.models.config_keys import AdjustedWidth, Dropout, SparseLayers
from ligerprof.models.delta import ShortConv
from ligerprof.models.layer_tensors import Linear, NormWeight, RawWeight
from ligerprof.models.mixtures import Experts, Scoring
from ligerprof.models.rows.experts import AUXILIARY, DOWN, GATES, ROUTER
from ligerprof.models.rows.parts import attention_tensors, head_norms, norm_tensors

_MIXERS: tuple[Linear | NormWeight | RawWeight, ...] = (
    *(replace(item, recurrent=False) for item in attention_tensors(out="out_proj")),
    *(replace(item, recurrent=False) for item in head_norms("q_layernorm", "k_layernorm")),
    RawWeight(name="conv.conv", parameter="weight", shape=(("hidden",), ("one",), ("kernel",)), recurrent=True),
    Linear(name="conv.in_proj", inputs="hidden", outputs=("hidden",) * 3, recurrent=True),
    Linear(name="conv.out_proj", inputs="hidden", outputs=("hidden",), recurrent=True),
)
_MLP = (
    Linear(name="feed_forward.w1", inputs="hidden", outputs=("intermediate",)),
    Linear(name="feed_forward.w3", inputs="hidden", outputs=("intermediate",)),
    Linear(name="feed_forward.w2", inputs="intermediate", outputs=("hidden",)),
)
_EXPERTS = (
    replace(GATES, name="feed_forward.experts", sparse=True),
    replace(DOWN, name="feed_forward.experts", sparse=True),
    replace(ROUTER, name="feed_forward.gate", sparse=True),
)
_NORMS = norm_tensors("operator_norm", "ffn_norm")

_LFM2 = Architecture(
    model_type="lfm2",
    peft_targets=(),
    class_prefix="Lfm2",
    defaults={"num_key_value_heads": 8, "conv_L_cache": 3, "block_multiple_of": 256},
    aliases={"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"},
    tensors=(*_MIXERS, *_MLP, *_NORMS),
    not_estimated=("conv_bias",),
    final_norm="model.embedding_norm",
    attention=Attention(out="out_proj", qk_norms=("q_layernorm", "k_layernorm"), dropout=Dropout(key="no_dropout")),
    short_conv=ShortConv(),
    mlp=Mlp(
        name="feed_forward",
        inputs=("w1", "w3"),
        down="w2",
        activation=None,
        adjusted=AdjustedWidth(
            switch="block_auto_adjust_ff_dim", factor="block_ffn_dim_multiplier", multiple="block_multiple_of"
        ),
    ),
    layer_norms=LayerNorms(before_attention="operator_norm", before_mlp="ffn_norm", own_forward=True),
    tied_by_default=True,
)

ROWS = (
    _LFM2,
    replace(
        _LFM2,
        model_type="lfm2_moe",
        class_prefix="Lfm2Moe",
        defaults={
            "num_key_value_heads": 8,
            "conv_L_cache": 3,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
            "norm_topk_prob": True,
        },
        aliases={},
        tensors=(*_MIXERS, *(replace(item, sparse=False) for item in _MLP), *_EXPERTS, *_NORMS),
        not_estimated=("conv_bias", AUXILIARY),
        mlp=replace(
            _LFM2.mlp,
            adjusted=None,
            experts=Experts(
                width="moe_intermediate_size",
                scoring=Scoring.SIGMOID,
                layers=SparseLayers(first=("num_dense_layers", 2)),
            ),
        ),
        auxiliary_loss=AUXILIARY,
    ),
)
