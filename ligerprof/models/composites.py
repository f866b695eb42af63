"""Models that join a vision tower and a text model: the rows of text models that come with a tower only."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ligerprof.models.architecture import Architecture, Attention, Rotary
from ligerprof.models.rows.dense import LLAMA
from ligerprof.models.rows.parts import CONFIGURED_ATTENTION, PLAIN_GATED, TWO_NORMS, attention_tensors, head_norms

# model types whose `text_config` is the config of the text model
COMPOSITES = frozenset(
    {
        "gemma3",
        "llava",
        "llava_next",
        "mistral3",
        "mllama",
        "paligemma",
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3_vl",
    }
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
