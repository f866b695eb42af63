"""The supported architectures, one row per `model_type`."""

from dataclasses import replace

from ligerprof.models.architecture import (
    Architecture,
    Attention,
    Dropout,
    Feature,
    LayerNorms,
    Linear,
    Mlp,
    Norm,
    NormWeight,
    ResidualDropout,
    Rotary,
    SlidingWindow,
    Softcap,
)


def _attention_tensors(*, qkv_bias: bool | str = False, out_bias: bool | str = False) -> tuple[Linear, ...]:
    return (
        Linear(name="self_attn.q_proj", inputs="hidden", outputs=("query",), bias=qkv_bias),
        Linear(name="self_attn.k_proj", inputs="hidden", outputs=("key",), bias=qkv_bias),
        Linear(name="self_attn.v_proj", inputs="hidden", outputs=("key",), bias=qkv_bias),
        Linear(name="self_attn.o_proj", inputs="query", outputs=("hidden",), bias=out_bias),
    )


def _mlp_tensors(*, bias: bool | str = False) -> tuple[Linear, ...]:
    return (
        Linear(name="mlp.gate_proj", inputs="hidden", outputs=("intermediate",), bias=bias),
        Linear(name="mlp.up_proj", inputs="hidden", outputs=("intermediate",), bias=bias),
        Linear(name="mlp.down_proj", inputs="intermediate", outputs=("hidden",), bias=bias),
    )


def _norm_tensors(*names: str) -> tuple[NormWeight, ...]:
    return tuple(NormWeight(name=name) for name in names)


_CONFIGURED_ATTENTION = _attention_tensors(qkv_bias="attention_bias", out_bias="attention_bias")
_TWO_NORMS = _norm_tensors("input_layernorm", "post_attention_layernorm")
# transformers builds Mistral's and Qwen's MLPs without biases, whatever the config says
_PLAIN_MLP = _mlp_tensors()
_QWEN_WINDOW = SlidingWindow(
    default=4096, switch="use_sliding_window", from_layer=("max_window_layers", 28), mixes=True
)
_GEMMA_NORM = Norm(eps="eps", offset=1.0, casts_last=True)

_ROWS = (
    Architecture(
        model_type="llama",
        class_prefix="Llama",
        tensors=(*_CONFIGURED_ATTENTION, *_mlp_tensors(bias="mlp_bias"), *_TWO_NORMS),
    ),
    Architecture(
        model_type="mistral",
        class_prefix="Mistral",
        tensors=(*_attention_tensors(), *_PLAIN_MLP, *_TWO_NORMS),
        attention=Attention(window=SlidingWindow(default=4096)),
    ),
    Architecture(
        model_type="qwen2",
        class_prefix="Qwen2",
        tensors=(*_attention_tensors(qkv_bias=True), *_PLAIN_MLP, *_TWO_NORMS),
        attention=Attention(window=_QWEN_WINDOW),
    ),
    Architecture(
        model_type="qwen3",
        class_prefix="Qwen3",
        tensors=(
            *_CONFIGURED_ATTENTION,
            NormWeight(name="self_attn.q_norm", width="head"),
            NormWeight(name="self_attn.k_norm", width="head"),
            *_PLAIN_MLP,
            *_TWO_NORMS,
        ),
        attention=Attention(qk_norms=("q_norm", "k_norm"), window=_QWEN_WINDOW),
    ),
    Architecture(
        model_type="gemma",
        class_prefix="Gemma",
        tensors=(*_CONFIGURED_ATTENTION, *_PLAIN_MLP, *_TWO_NORMS),
        norm=_GEMMA_NORM,
        mlp=Mlp(gate=Feature.GEGLU),
        scales_embedding=True,
        tied_by_default=True,
    ),
    Architecture(
        model_type="gemma2",
        class_prefix="Gemma2",
        tensors=(
            *_CONFIGURED_ATTENTION,
            *_PLAIN_MLP,
            *_TWO_NORMS,
            *_norm_tensors("pre_feedforward_layernorm", "post_feedforward_layernorm"),
        ),
        norm=_GEMMA_NORM,
        attention=Attention(
            window=SlidingWindow(default=4096, mixes=True),
            softcap=Softcap(key="attn_logit_softcapping", default=50.0),
        ),
        mlp=Mlp(gate=Feature.GEGLU),
        layer_norms=LayerNorms(
            after_attention="post_attention_layernorm",
            before_mlp="pre_feedforward_layernorm",
            after_mlp="post_feedforward_layernorm",
        ),
        scales_embedding=True,
        final_softcap=Softcap(key="final_logit_softcapping", default=30.0),
        tied_by_default=True,
    ),
    Architecture(
        model_type="phi3",
        peft_targets=(),
        class_prefix="Phi3",
        tensors=(
            Linear(name="self_attn.o_proj", inputs="query", outputs=("hidden",)),
            Linear(name="self_attn.qkv_proj", inputs="hidden", outputs=("query", "key", "key")),
            Linear(name="mlp.gate_up_proj", inputs="hidden", outputs=("intermediate", "intermediate")),
            Linear(name="mlp.down_proj", inputs="intermediate", outputs=("hidden",)),
            *_TWO_NORMS,
        ),
        attention=Attention(
            qkv=("qkv_proj",), slices=True, rotary=Rotary(share="partial_rotary_factor"), window=SlidingWindow()
        ),
        mlp=Mlp(inputs=("gate_up_proj",), activation="activation_fn"),
        residual_dropout=ResidualDropout(
            after_attention="resid_attn_dropout", after_mlp="resid_mlp_dropout", dropout=Dropout(key="resid_pdrop")
        ),
    ),
    Architecture(
        model_type="olmo2",
        peft_targets=(),
        class_prefix="Olmo2",
        tensors=(
            *_CONFIGURED_ATTENTION,
            NormWeight(name="self_attn.q_norm", width="query"),
            NormWeight(name="self_attn.k_norm", width="key"),
            *_PLAIN_MLP,
            *_norm_tensors("post_attention_layernorm", "post_feedforward_layernorm"),
        ),
        norm=Norm(casts_last=True),
        attention=Attention(qk_norms=("q_norm", "k_norm"), rotary=Rotary(fp32_tables=True)),
        layer_norms=LayerNorms(
            before_attention=None,
            after_attention="post_attention_layernorm",
            before_mlp=None,
            after_mlp="post_feedforward_layernorm",
        ),
    ),
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
        norm=Norm(feature=Feature.LAYER_NORM),
        attention=Attention(
            name="attn",
            qkv=("c_attn",),
            out="c_proj",
            rotary=None,
            fp32_softmax=False,
            dropout=Dropout(key="attn_pdrop", default=0.1),
            output_dropout=Dropout(key="resid_pdrop", default=0.1),
        ),
        mlp=Mlp(gate=None, inputs=("c_fc",), down="c_proj", dropout=Dropout(key="resid_pdrop", default=0.1)),
        layer_norms=LayerNorms(before_attention="ln_1", before_mlp="ln_2", held_in_mlp=True),
        embedding_dropout=Dropout(key="embd_pdrop", default=0.1),
        tied_by_default=True,
        mask_by_position=True,
        output_class="CausalLMOutputWithCrossAttentions",
    ),
)

ARCHITECTURES: dict[str, Architecture] = {row.model_type: row for row in _ROWS}


# most models without a row resemble Llama; messages name the softcaps
_UNLISTED = replace(
    ARCHITECTURES["llama"],
    attention=Attention(softcap=Softcap(key="attn_logit_softcapping")),
    final_softcap=Softcap(key="final_logit_softcapping"),
)


def find_architecture(model_type: str) -> Architecture:
    """The row of a `model_type`; one without a row gets Llama's, and can be simulated and measured only."""
    return ARCHITECTURES.get(model_type) or replace(_UNLISTED, model_type=model_type)


def has_row(model_type: str) -> bool:
    """Whether the architecture has a row of its own."""
    return model_type in ARCHITECTURES
