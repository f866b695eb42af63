"""Gemma and its successors: GeGLU, norms with an offset of one, scaled embeddings."""

from dataclasses import replace

from ligerprof.models.architecture import Architecture, Attention, LayerNorms, Rotary
from ligerprof.models.config_keys import Softcap
from ligerprof.models.rows.parts import (
    CONFIGURED_ATTENTION,
    GEGLU,
    GEMMA_NORM,
    PLAIN_GATED,
    TWO_NORMS,
    head_norms,
    norm_tensors,
    periodic_window,
)

_SCORE_CAP, _LOGIT_CAP = "attn_logit_softcapping", "final_logit_softcapping"
_FOUR_NORMS = (*TWO_NORMS, *norm_tensors("pre_feedforward_layernorm", "post_feedforward_layernorm"))

_GEMMA = Architecture(
    model_type="gemma",
    class_prefix="Gemma",
    defaults={"head_dim": 256},
    tensors=(*CONFIGURED_ATTENTION, *PLAIN_GATED, *TWO_NORMS),
    norm=GEMMA_NORM,
    mlp=GEGLU,
    scales_embedding="module",
    tied_by_default=True,
)

_GEMMA2 = replace(
    _GEMMA,
    model_type="gemma2",
    class_prefix="Gemma2",
    defaults={"num_key_value_heads": 4, "head_dim": 256},
    tensors=(*CONFIGURED_ATTENTION, *PLAIN_GATED, *_FOUR_NORMS),
    attention=Attention(window=periodic_window(2), softcap=Softcap(key=_SCORE_CAP, default=50.0)),
    layer_norms=LayerNorms(
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
    final_softcap=Softcap(key=_LOGIT_CAP, default=30.0),
)

ROWS = (
    _GEMMA,
    _GEMMA2,
    replace(
        _GEMMA2,
        model_type="gemma3_text",
        class_prefix="Gemma3",
        modeling="gemma3",
        peft_targets=("q_proj", "v_proj"),
        defaults={"num_key_value_heads": 4, "head_dim": 256},
        not_estimated=("use_bidirectional_attention",),
        tensors=(*CONFIGURED_ATTENTION, *head_norms(), *PLAIN_GATED, *_FOUR_NORMS),
        attention=Attention(
            qk_norms=("q_norm", "k_norm"),
            norms_apart=True,
            rotary=Rotary(tables_by_kind=True),
            # its attention keeps attn_logit_softcapping, and does not pass it on
            window=periodic_window(6, key="sliding_window_pattern"),
        ),
        final_softcap=Softcap(key=_LOGIT_CAP),
    ),
    replace(
        _GEMMA2,
        model_type="vaultgemma",
        class_prefix="VaultGemma",
        peft_targets=(),
        defaults={"num_key_value_heads": 4, "head_dim": 256},
        tensors=(
            *CONFIGURED_ATTENTION,
            *PLAIN_GATED,
            *norm_tensors("input_layernorm", "pre_feedforward_layernorm"),
        ),
        layer_norms=LayerNorms(before_mlp="pre_feedforward_layernorm"),
    ),
)
