"""The models that liger-kernel itself can patch, most of which have no row here."""

from ligerprof.models import ModelSpec

# what liger-kernel 0.8.5 can patch (transformers/monkey_patch.py) with a fused loss
# fmt: off
LIGER_MODEL_TYPES = frozenset({
    "deepseek_v2", "deepseek_v3", "gemma", "gemma2", "gemma3", "glm4", "glm4v", "glm4v_moe", "gpt_oss", "granite",
    "internvl", "llama", "llama4", "llava", "ministral", "mistral", "mixtral", "mllama", "nemotron", "olmo2",
    "olmo3", "paligemma", "phi3", "qwen2", "qwen2_vl", "qwen2_5_vl", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl",
    "qwen3_vl_moe", "smollm3", "smolvlm",
})

# of the architectures that have a row here, those that its patchers take, and kernels that they lack there: its ce has
# no effect on some, and its patcher of dense MLPs in qwen3_moe fails
_PATCHED = frozenset({
    "deepseek_v2", "deepseek_v3", "exaone4", "falcon_h1", "gemma", "gemma2", "gemma3_text", "glm4", "gpt_oss",
    "granite", "hunyuan_v1_dense", "hunyuan_v1_moe", "llama", "llama4_text", "ministral", "mistral", "mixtral",
    "nemotron", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "qwen3_5_text", "qwen3_moe", "qwen3_next", "smollm3",
})
# fmt: on
_LACKING = {
    "ce": ("llama4_text", "ministral", "mistral", "nemotron"),
    "flce": ("granite",),
    "swiglu": ("qwen3_moe",),
}
# architectures whose norms of query and key its patchers leave as they are
_HEAD_NORMS_LEFT = frozenset({"hunyuan_v1_dense", "hunyuan_v1_moe", "olmo2", "olmo3"})
# architectures whose experts its patchers of SwiGLU replace by one function (LigerFusedMoEFunction)
_EXPERTS_FUSED = frozenset({"deepseek_v2", "deepseek_v3", "hunyuan_v1_moe", "mixtral", "qwen3_next"})


def unpatched_norms(spec: ModelSpec) -> tuple[str, ...]:
    """The norms in a layer's attention that liger-kernel does not patch."""
    row = spec.architecture
    return row.attention.qk_norms or () if row.model_type in _HEAD_NORMS_LEFT else ()


def unpatched_mlps(spec: ModelSpec) -> tuple[str, ...]:
    """The gated MLPs of a layer that liger-kernel does not patch."""
    return ("shared_mlp",) if spec.architecture.model_type == "hunyuan_v1_moe" else ()


def fuses_experts(spec: ModelSpec) -> bool:
    """Whether liger-kernel's SwiGLU replaces a model's experts."""
    return spec.architecture.model_type in _EXPERTS_FUSED


def unpatched_reason(model_type: str, kernel: str) -> str | None:
    """Why liger-kernel cannot put a kernel of its own into models of an architecture with a row here, or None."""
    if model_type not in _PATCHED:
        return f"liger-kernel cannot patch {model_type!r} models"
    if model_type in _LACKING.get(kernel, ()):
        return f"liger-kernel has no {kernel} for {model_type}"
    return None
