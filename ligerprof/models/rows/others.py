"""Decoders with LayerNorms, plain MLPs, or sublayers that run in parallel."""

from dataclasses import replace

from ligerprof.models.architecture import (
    Architecture,
    Attention,
    LayerNorms,
    Mlp,
    Norm,
    NormForm,
    ResidualDropout,
    Rotary,
)
from ligerprof.models.config_keys import Dropout, SlidingWindow
from ligerprof.models.layer_tensors import Linear, NormWeight, RawWeight
from ligerprof.models.mixtures import Experts, Scoring
from ligerprof.models.rows.experts import AUXILIARY, DOWN, GATES, ROUTER
from ligerprof.models.rows.parts import (
    CONFIGURED_ATTENTION,
    PLAIN_GATED,
    SQUARED_RELU,
    TWO_NORMS,
    attention_tensors,
    head_norms,
    norm_tensors,
    periodic_window,
    plain_tensors,
)

_LAYER_NORM = Norm(form=NormForm.LAYER)
_PARTIAL = Rotary(share="partial_rotary_factor")
_NO_DROPOUT = "no_dropout"

_COHERE = Architecture(
    model_type="cohere",
    peft_targets=(),
    class_prefix="Cohere",
    defaults={"logit_scale": 0.0625, "tie_word_embeddings": True},
    tensors=(
        *CONFIGURED_ATTENTION,
        NormWeight(name="self_attn.q_norm", width="query", when="use_qk_norm", by_head=True),
        NormWeight(name="self_attn.k_norm", width="key", when="use_qk_norm", by_head=True),
        *PLAIN_GATED,
        *norm_tensors("input_layernorm"),
    ),
    norm=Norm(form=NormForm.CENTERED),
    attention=Attention(qk_norms=("q_norm", "k_norm"), rotary=Rotary(interleaved=True)),
    layer_norms=LayerNorms(before_mlp=None, parallel=True),
    logit_scale="logit_scale",
)

ROWS = (
    Architecture(
        model_type="gpt2",
        peft_targets=(),
        class_prefix="GPT2",
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
            out="c_proj",
            rotary=None,
            fp32_softmax=False,
            dropout=Dropout(key="attn_pdrop", default=0.1),
            output_dropout=Dropout(key="resid_pdrop", default=0.1),
        ),
        mlp=Mlp(
            gate=None,
            inputs=("c_fc",),
            down="c_proj",
            function=("activation_function", "gelu_new"),
            dropout=Dropout(key="resid_pdrop", default=0.1),
        ),
        layer_norms=LayerNorms(before_attention="ln_1", before_mlp="ln_2"),
        embedding_dropout=Dropout(key="embd_pdrop", default=0.1),
        tied_by_default=True,
        mask_by_position=True,
    ),
    Architecture(
        model_type="arcee",
        peft_targets=(),
        class_prefix="Arcee",
        tensors=(*CONFIGURED_ATTENTION, *plain_tensors("up_proj", "down_proj", bias="mlp_bias"), *TWO_NORMS),
        mlp=SQUARED_RELU,
    ),
    Architecture(
        model_type="apertus",
        peft_targets=(),
        class_prefix="Apertus",
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
        attention=Attention(qk_norms=("q_norm", "k_norm"), norms_apart=True),
        mlp=Mlp(gate=None, inputs=("up_proj",), function=("hidden_act", "xielu")),
        layer_norms=LayerNorms(before_attention="attention_layernorm", before_mlp="feedforward_layernorm"),
    ),
    Architecture(
        model_type="jais2",
        peft_targets=(),
        class_prefix="Jais2",
        defaults={"attention_bias": True, "mlp_bias": True},
        tensors=(*CONFIGURED_ATTENTION, *plain_tensors("up_proj", "down_proj", bias="mlp_bias"), *TWO_NORMS),
        norm=_LAYER_NORM,
        mlp=SQUARED_RELU,
    ),
    Architecture(
        model_type="nemotron",
        peft_targets=(),
        class_prefix="Nemotron",
        defaults={"partial_rotary_factor": 0.5},
        tensors=(*CONFIGURED_ATTENTION, *plain_tensors("up_proj", "down_proj", bias="mlp_bias"), *TWO_NORMS),
        norm=Norm(form=NormForm.LAYER_PLUS_ONE),
        attention=Attention(rotary=_PARTIAL),
        mlp=SQUARED_RELU,
    ),
    Architecture(
        model_type="starcoder2",
        peft_targets=(),
        class_prefix="Starcoder2",
        defaults={"num_key_value_heads": 2, "use_bias": True, "tie_word_embeddings": True},
        tensors=(
            *attention_tensors(qkv_bias="use_bias", out_bias="use_bias"),
            *plain_tensors("c_fc", "c_proj", bias="use_bias"),
            *TWO_NORMS,
        ),
        norm=_LAYER_NORM,
        attention=Attention(window=SlidingWindow(), output_dropout=Dropout(key="residual_dropout")),
        mlp=Mlp(
            gate=None,
            inputs=("c_fc",),
            down="c_proj",
            function=("hidden_act", "gelu_pytorch_tanh"),
            dropout=Dropout(key="residual_dropout"),
        ),
        embedding_dropout=Dropout(key="embedding_dropout"),
    ),
    Architecture(
        model_type="stablelm",
        peft_targets=("q_proj", "v_proj"),
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
        layer_norms=LayerNorms(parallel=True, parallel_when="use_parallel_residual"),
        attention=Attention(splits_hidden=True, rotary=_PARTIAL),
        residual_dropout=ResidualDropout(
            after_attention=None, after_mlp="dropout", dropout=Dropout(key="hidden_dropout")
        ),
    ),
    Architecture(
        model_type="olmo",
        peft_targets=(),
        class_prefix="Olmo",
        tensors=(*CONFIGURED_ATTENTION, *PLAIN_GATED, *TWO_NORMS),
        not_estimated=("clip_qkv",),
        norm=Norm(form=NormForm.LAYER_BARE),
        attention=Attention(rotary=Rotary(fp32_tables=True)),
    ),
    Architecture(
        model_type="phi",
        peft_targets=("q_proj", "v_proj", "fc1", "fc2"),
        class_prefix="Phi",
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
        attention=Attention(out="dense", rotary=_PARTIAL),
        mlp=Mlp(
            gate=None, inputs=("fc1",), down="fc2", activation="activation_fn", function=("hidden_act", "gelu_new")
        ),
        layer_norms=LayerNorms(before_mlp=None, parallel=True),
        residual_dropout=ResidualDropout(
            after_attention="resid_dropout", after_mlp="resid_dropout", dropout=Dropout(key="resid_pdrop")
        ),
        embedding_dropout=Dropout(key="embd_pdrop"),
    ),
    Architecture(
        model_type="phimoe",
        peft_targets=(),
        class_prefix="Phimoe",
        defaults={"num_key_value_heads": 8, "num_local_experts": 16, "num_experts_per_tok": 2},
        tensors=(
            *CONFIGURED_ATTENTION,
            RawWeight(name="mlp.router", parameter="weight", shape=ROUTER.shape),
            GATES,
            DOWN,
            *TWO_NORMS,
        ),
        not_estimated=(AUXILIARY,),
        head_bias="lm_head_bias",
        norm=_LAYER_NORM,
        attention=Attention(window=SlidingWindow()),
        mlp=Mlp(
            experts=Experts(
                count="num_local_experts",
                chosen=2,
                router="router",
                scoring=Scoring.DRAWN,
                noise="input_jitter_noise",
                noise_in_router=True,
            )
        ),
        auxiliary_loss=AUXILIARY,
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
            name="attention", qkv=("query_key_value",), grouped=False, splits_hidden=True, out="dense", rotary=_PARTIAL
        ),
        mlp=Mlp(
            gate=None,
            inputs=("dense_h_to_4h",),
            down="dense_4h_to_h",
            activation="act",
            function=("hidden_act", "gelu"),
        ),
        layer_norms=LayerNorms(parallel=True, parallel_when="use_parallel_residual"),
        residual_dropout=ResidualDropout(
            after_attention="post_attention_dropout",
            after_mlp="post_mlp_dropout",
            dropout=Dropout(key="hidden_dropout"),
        ),
        embedding_dropout=Dropout(key="hidden_dropout"),
    ),
    _COHERE,
    replace(
        _COHERE,
        model_type="cohere2",
        peft_targets=(),
        class_prefix="Cohere2",
        tensors=(*CONFIGURED_ATTENTION, *PLAIN_GATED, *norm_tensors("input_layernorm")),
        attention=Attention(
            rotary=Rotary(interleaved=True, only_with_window="never"),
            window=periodic_window(4, key="sliding_window_pattern"),
        ),
    ),
)
