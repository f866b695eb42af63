"""Small configs of models that are estimated from tapes."""

from typing import Any

from ligerprof.models import spec_from_config
from ligerprof.recipe.training import TrainingRecipe

_SIZES = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 3000}
_LLAMA = {**_SIZES, "num_key_value_heads": 2, "intermediate_size": 384, "max_position_embeddings": 4096}
_GPT = {"n_embd": 128, "n_layer": 4, "n_head": 4, "vocab_size": 3000}
CONFIGS: dict[str, dict[str, Any]] = {
    "opt": {**_SIZES, "word_embed_proj_dim": 128, "ffn_dim": 512, "max_position_embeddings": 4096},
    "gptj": {**_GPT, "rotary_dim": 16},
    "bloom": {"hidden_size": 128, "n_layer": 4, "n_head": 4, "vocab_size": 3000},
    "gpt_neo": {
        "hidden_size": 128,
        "num_layers": 4,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 2]],
        "vocab_size": 3000,
    },
    "codegen": {**_GPT, "rotary_dim": 16},
    "mpt": {"d_model": 128, "n_layers": 4, "n_heads": 4, "vocab_size": 3000, "max_seq_len": 4096},
    "persimmon": {**_SIZES, "intermediate_size": 512},
    "biogpt": {**_SIZES, "intermediate_size": 512, "max_position_embeddings": 4096},
    "xglm": {"d_model": 128, "ffn_dim": 512, "num_layers": 4, "attention_heads": 4, "vocab_size": 3000},
    "mamba2": {**_SIZES, "head_dim": 32, "num_heads": 8, "state_size": 16, "n_groups": 1, "chunk_size": 64},
    "falcon": {**_SIZES, "ffn_hidden_size": 512},
    "gpt_bigcode": {**_GPT, "n_positions": 4096},
    "diffllama": _LLAMA,
    "nanochat": _LLAMA,
    "bitnet": _LLAMA,
    "minicpm3": {
        **_LLAMA,
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
    },
    "jamba": {
        **_LLAMA,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "mamba_dt_rank": 16,
        "use_mamba_kernels": False,
    },
    "nemotron_h": {
        **_LLAMA,
        "layers_block_type": ["mamba", "attention", "mamba", "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 1,
        "chunk_size": 64,
        "head_dim": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 64,
    },
    "recurrent_gemma": {
        **_LLAMA,
        "lru_width": 128,
        "attention_window_size": 512,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "afmoe": {
        **_LLAMA,
        "head_dim": 32,
        "moe_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_dense_layers": 2,
    },
    "cohere2_moe": {**_LLAMA, "head_dim": 32, "num_experts": 4},
    "ctrl": {**_GPT, "dff": 512, "n_positions": 4096},
    "openai-gpt": {**_GPT, "n_positions": 4096},
    "gpt_neox_japanese": {**_SIZES, "max_position_embeddings": 4096},
    "granite_swa": _LLAMA,
    "doge": _LLAMA,
    "modernbert-decoder": {**_LLAMA, "pad_token_id": 0},
}
# encoders and classifiers by their transformers class; one of a decoder with a row
_ENCODER = {**_SIZES, "intermediate_size": 512, "max_position_embeddings": 1026}
CLASSES: dict[str, dict[str, Any]] = {
    "BertForSequenceClassification": {"model_type": "bert", **_ENCODER},
    "LlamaForSequenceClassification": {"model_type": "llama", **_LLAMA, "num_labels": 1},
    "BertForMaskedLM": {"model_type": "bert", **_ENCODER},
    "RobertaForTokenClassification": {"model_type": "roberta", **_ENCODER, "num_labels": 9},
    "ModernBertForMaskedLM": {
        "model_type": "modernbert",
        **_ENCODER,
        "pad_token_id": 0,
        "global_attn_every_n_layers": 2,
        "local_attention": 128,
    },
    "DistilBertForSequenceClassification": {
        "model_type": "distilbert",
        "dim": 128,
        "n_layers": 4,
        "n_heads": 4,
        "hidden_dim": 512,
        "vocab_size": 3000,
        "max_position_embeddings": 1026,
    },
}
CLASSES |= {
    "ElectraForSequenceClassification": {"model_type": "electra", **_ENCODER, "embedding_size": 64},
    "EsmForMaskedLM": {"model_type": "esm", **_ENCODER, "pad_token_id": 0, "mask_token_id": 1},
    "EuroBertForMaskedLM": {"model_type": "eurobert", **_LLAMA, "pad_token_id": 0},
    "NomicBertForMaskedLM": {"model_type": "nomic_bert", **_ENCODER},
    "GteForMaskedLM": {"model_type": "gte", **_ENCODER},
}
# models of text and images, with the text model's sizes and a vision tower of two layers
_VISION = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
CLASSES |= {
    "LlavaForConditionalGeneration": {
        "model_type": "llava",
        "text_config": {"model_type": "llama", **_LLAMA},
        "vision_config": {"model_type": "clip_vision_model", **_VISION, "image_size": 64, "patch_size": 16},
        "image_token_index": 2999,
    },
    "Qwen2VLForConditionalGeneration": {
        "model_type": "qwen2_vl",
        "text_config": {
            "model_type": "qwen2_vl_text",
            **_LLAMA,
            "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
        },
        "vision_config": {"depth": 2, "embed_dim": 64, "num_heads": 4, "hidden_size": 128},
        "image_token_id": 2999,
        "video_token_id": 2998,
        "vision_start_token_id": 2997,
        "vision_end_token_id": 2996,
    },
    "Gemma3ForConditionalGeneration": {
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", **_LLAMA, "head_dim": 32, "sliding_window": 128},
        "vision_config": {"model_type": "siglip_vision_model", **_VISION, "image_size": 64, "patch_size": 16},
        "mm_tokens_per_image": 4,
        "image_token_index": 2999,
    },
    "SmolVLMForConditionalGeneration": {
        "model_type": "smolvlm",
        "text_config": {"model_type": "llama", **_LLAMA},
        "vision_config": {**_VISION, "image_size": 64, "patch_size": 16},
        "image_token_id": 2999,
    },
}
_TOWER = {**_VISION, "image_size": 64, "patch_size": 16}
_QWEN2 = {"model_type": "qwen2", **_LLAMA}
CLASSES |= {
    "LlavaOnevisionForConditionalGeneration": {
        "model_type": "llava_onevision",
        "text_config": _QWEN2,
        "vision_config": {"model_type": "siglip_vision_model", **_TOWER},
        "image_token_index": 2999,
        "video_token_index": 2998,
    },
    "Idefics3ForConditionalGeneration": {
        "model_type": "idefics3",
        "text_config": {"model_type": "llama", **_LLAMA},
        "vision_config": _TOWER,
        "image_token_id": 2999,
    },
    "InternVLForConditionalGeneration": {
        "model_type": "internvl",
        "text_config": _QWEN2,
        "vision_config": {**_VISION, "image_size": [64, 64], "patch_size": [16, 16]},
        "image_token_id": 2999,
    },
    "PaliGemmaForConditionalGeneration": {
        "model_type": "paligemma",
        "text_config": {"model_type": "gemma", **_LLAMA, "head_dim": 32},
        "vision_config": {"model_type": "siglip_vision_model", **_TOWER, "projection_dim": 128},
        "image_token_index": 2999,
        "projection_dim": 128,
    },
    "Mistral3ForConditionalGeneration": {
        "model_type": "mistral3",
        "text_config": {"model_type": "mistral", **_LLAMA, "head_dim": 32},
        "vision_config": {"model_type": "pixtral", **_TOWER},
        "image_token_index": 2999,
    },
    "AyaVisionForConditionalGeneration": {
        "model_type": "aya_vision",
        "text_config": {"model_type": "cohere2", **_LLAMA},
        "vision_config": {"model_type": "siglip_vision_model", **_TOWER},
        "image_token_index": 2999,
    },
}
# architectures whose transformers classes have no sdpa
EAGER = frozenset(
    {
        "gptj",
        "bloom",
        "gpt_neo",
        "codegen",
        "mpt",
        "xglm",
        "mamba2",
        "recurrent_gemma",
        "ctrl",
        "openai-gpt",
        "granite_swa",
        "gpt_neox_japanese",
    }
)


def recipe_of(family: str, **options: Any) -> TrainingRecipe:
    """A recipe of the small model of a family or class."""
    named = {"architectures": [family], **CLASSES[family]} if family in CLASSES else {"model_type": family}
    spec = spec_from_config({**CONFIGS.get(family, {}), **named}, name=family)
    attention = "eager" if family in EAGER else "sdpa"
    return TrainingRecipe(**{"model": spec, "batch": 2, "seq": 256, "attention": attention, **options})
