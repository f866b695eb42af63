"""The supported architectures, one row per `model_type`."""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from ligerprof.models.architecture import Architecture, Attention, Rotary
from ligerprof.models.config_keys import Number
from ligerprof.models.rows.dense import GEMMA_ROWS, LLAMA, LLAMA_ROWS, OTHER_ROWS
from ligerprof.models.rows.experts import BATCHED_ROWS, EXPERT_ROWS, LATENT_ROWS, SIGMOID_ROWS
from ligerprof.models.rows.mixers import DELTA_ROWS, SHORT_CONV_ROWS, STATE_SPACE_ROWS, STREAM_ROWS
from ligerprof.models.rows.parts import CONFIGURED_ATTENTION, PLAIN_GATED, TWO_NORMS, attention_tensors, head_norms

# model types whose `text_config` is the config of the text model
COMPOSITES = frozenset(
    {"gemma3", "llava", "llava_next", "mistral3", "mllama", "paligemma", "qwen2_5_vl", "qwen2_vl", "qwen3_vl"}
)

# model types whose causal language model in transformers (AutoModelForCausalLM) is the text model alone
TEXT_ALONE = frozenset({"llama4", "qwen3_5", "qwen3_5_moe"})

# keys of the text model's config
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
# a config of one model has one of these
_SIZES = ("hidden_size", "n_embd", "d_model")

_QWEN2_VL = Architecture(
    model_type="qwen2_vl_text",
    modeling="qwen2_vl",
    class_prefix="Qwen2VL",
    classes={"MLP": ("Qwen2MLP",), "RMSNorm": ("Qwen2VLRMSNorm", "Qwen2RMSNorm")},
    tensors=(*attention_tensors(qkv_bias=True), *PLAIN_GATED, *TWO_NORMS),
    attention=Attention(splits_hidden=True, rotary=Rotary(other=True)),
    layers="model.language_model.layers",
)

TEXT_MODELS: dict[str, Architecture] = {
    row.model_type: row
    for row in (
        _QWEN2_VL,
        replace(
            _QWEN2_VL,
            model_type="qwen2_5_vl_text",
            modeling="qwen2_5_vl",
            class_prefix="Qwen2_5_VL",
            classes={"MLP": ("Qwen2MLP",), "RMSNorm": ("Qwen2_5_VLRMSNorm", "Qwen2RMSNorm")},
        ),
        Architecture(
            model_type="qwen3_vl_text",
            modeling="qwen3_vl",
            class_prefix="Qwen3VLText",
            defaults={"head_dim": 128},
            tensors=(*CONFIGURED_ATTENTION, *head_norms(), *PLAIN_GATED, *TWO_NORMS),
            attention=Attention(qk_norms=("q_norm", "k_norm")),
            layers="model.language_model.layers",
        ),
        replace(
            LLAMA,
            model_type="mllama_text_model",
            modeling="mllama",
            class_prefix="MllamaText",
            classes={"Attention": ("MllamaTextSelfAttention",), "DecoderLayer": ("MllamaSelfAttentionDecoderLayer",)},
            layers="model.language_model.layers",
        ),
    )
}


def is_composite(model_type: str) -> bool:
    """Whether models of this type join a vision tower and a text model."""
    return model_type in COMPOSITES


def text_config(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """Key and config of the text model within that of a model that joins it with others; None for other configs."""
    if config.get("model_type") not in COMPOSITES and any(key in config for key in _SIZES):
        return None
    found = ((key, config.get(key)) for key in _TEXT_CONFIGS)
    return next(((key, text) for key, text in found if isinstance(text, Mapping)), None)


ARCHITECTURES: dict[str, Architecture] = {
    row.model_type: row
    for row in (
        *LLAMA_ROWS,
        *GEMMA_ROWS,
        *OTHER_ROWS,
        *EXPERT_ROWS,
        *LATENT_ROWS,
        *BATCHED_ROWS,
        *DELTA_ROWS,
        *SIGMOID_ROWS,
        *SHORT_CONV_ROWS,
        *STATE_SPACE_ROWS,
        *STREAM_ROWS,
    )
}


# most models without a row resemble Llama; messages name the softcaps
_UNLISTED = replace(
    LLAMA,
    attention=Attention(softcap=Number(key="attn_logit_softcapping")),
    final_softcap=Number(key="final_logit_softcapping"),
)


def find_architecture(model_type: str) -> Architecture:
    """The row of a `model_type`; one without a row gets Llama's, and can be simulated and measured only."""
    return ARCHITECTURES.get(model_type) or TEXT_MODELS.get(model_type) or replace(_UNLISTED, model_type=model_type)


def can_patch(model_type: str) -> bool:
    """Whether a row says where kernels go in the architecture."""
    return model_type in ARCHITECTURES or model_type in TEXT_MODELS


def has_row(model_type: str) -> bool:
    """Whether the architecture has a row of its own."""
    return model_type in ARCHITECTURES


def _last_names(*dotted: str | None) -> set[str]:
    return {name.rpartition(".")[2] for name in dotted if name is not None}


_ROWS = ARCHITECTURES.values()
# the literal names are of architectures without a row: GPT-NeoX, Bloom, Falcon, MPT
_LAYER_LISTS = _last_names("blocks", *(row.layers for row in _ROWS))
_TOKEN_EMBEDDINGS = tuple(sorted(_last_names("embed_in", "word_embeddings", *(row.embedding for row in _ROWS))))
_POSITIONS = _last_names(*(row.positions for row in _ROWS))
_HEADS = tuple(sorted(_last_names("embed_out", *(row.head for row in _ROWS))))
_ATTENTIONS = tuple(sorted({row.attention.name for row in _ROWS}))
_LAYER = re.compile(rf"^(?:(.*?)\.)?(?:{'|'.join(sorted(_LAYER_LISTS))})\.(\d{{1,4}})(?:\.|$)")


def layer_index(name: str) -> int | None:
    """Index of the decoder layer that a module or parameter belongs to, or None."""
    match = _LAYER.match(name)
    return int(match.group(2)) if match else None


def is_in_layer(name: str) -> bool:
    """Whether a module or parameter belongs to a decoder layer."""
    return layer_index(name) is not None


@lru_cache(maxsize=10_000)
def without_indices(name: str) -> str:
    """A name with `*` instead of each index: `layers.*.mlp` for `layers.3.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def body_of_layer(module: str) -> str | None:
    """Name of the module that holds the list of decoder layers if `module` is a decoder layer, else None."""
    match = _LAYER.match(module)
    return match.group(1) or "" if match and match.end() == len(module) else None


def is_token_embedding(module: str) -> bool:
    """Whether a module is the embedding of tokens."""
    return module.endswith(_TOKEN_EMBEDDINGS)


def is_embedding_weight(parameter: str) -> bool:
    """Whether a parameter belongs to an embedding of tokens or positions."""
    return not _POSITIONS.union(_TOKEN_EMBEDDINGS).isdisjoint(parameter.split("."))


def is_head(module: str) -> bool:
    """Whether a module is the output layer."""
    return module.endswith(_HEADS)


def is_attention(module: str) -> bool:
    """Whether a module is a layer's attention."""
    return module.endswith(_ATTENTIONS)
