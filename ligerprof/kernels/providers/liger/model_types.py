"""The models that liger-kernel itself can patch, most of which have no row here."""

# what liger-kernel 0.8.5 can patch (transformers/monkey_patch.py) with a fused loss
# fmt: off
LIGER_MODEL_TYPES = frozenset({
    "deepseek_v2", "deepseek_v3", "gemma", "gemma2", "gemma3", "glm4", "glm4v", "glm4v_moe", "gpt_oss", "granite",
    "internvl", "llama", "llama4", "llava", "ministral", "mistral", "mixtral", "mllama", "nemotron", "olmo2",
    "olmo3", "paligemma", "phi3", "qwen2", "qwen2_vl", "qwen2_5_vl", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl",
    "qwen3_vl_moe", "smollm3", "smolvlm",
})
# fmt: on
