"""Tiny models of every family, one training step of them, and a fingerprint that patching must not change."""

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from ligerprof.models import ARCHITECTURES

VOCAB = 211
_DECODER: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 68,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_DECODER, "tie_word_embeddings": True},
    "mistral": _DECODER,
    "qwen2": _DECODER,
    "qwen3": _DECODER,
    "gemma": {**_DECODER, "hidden_act": "gelu_pytorch_tanh"},
    # a low cap, so that it bends the logits of random weights
    "gemma2": {**_DECODER, "final_logit_softcapping": 0.5, "sliding_window": 8},
    "phi3": {**_DECODER, "resid_pdrop": 0.0, "sliding_window": 8},
    "olmo2": _DECODER,
    "gpt2": {
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 3,
        "vocab_size": VOCAB,
        "n_positions": 64,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
    },
}


# what the configs of the other architectures need in addition; the rows of the listed ones are varied above
_FEW_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT = {
    **_FEW_EXPERTS,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 3,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 8,
}
_DELTA = {
    **_FEW_EXPERTS,
    "num_hidden_layers": 4,
    "shared_expert_intermediate_size": 40,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
OTHER_CONFIGS: dict[str, dict[str, Any]] = {
    "cwm": {"bos_token_id": 1, "num_hidden_layers": 5, "sliding_window": 8},
    "cohere2": {"num_hidden_layers": 5, "sliding_window": 8},
    "cohere": {"use_qk_norm": True},
    "exaone4": {"num_hidden_layers": 5, "sliding_window": 8},
    "gemma3_text": {"num_hidden_layers": 7, "sliding_window": 8},
    **dict.fromkeys(("flex_olmo", "mixtral", "olmoe", "phimoe", "qwen3_moe"), _FEW_EXPERTS),
    "granitemoe": {**_FEW_EXPERTS, "residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "granitemoeshared": {**_FEW_EXPERTS, "shared_intermediate_size": 40, "residual_multiplier": 0.5},
    "qwen2_moe": {**_FEW_EXPERTS, "shared_expert_intermediate_size": 40},
    "gpt_oss": {**_FEW_EXPERTS, "sliding_window": 8, "num_hidden_layers": 3},
    **dict.fromkeys(("ernie4_5_moe", "hunyuan_v1_moe"), _FEW_EXPERTS),
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "glm4_moe": {**_FEW_EXPERTS, "first_k_dense_replace": 1},
    "gpt_neox": {"num_key_value_heads": 3},
    "glm4_moe_lite": _LATENT,
    "youtu": _LATENT,
    "dots1": {**_FEW_EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "exaone_moe": {**_FEW_EXPERTS, "num_hidden_layers": 5, "sliding_window": 8},
    **dict.fromkeys(("minimax_m2", "solar_open"), _FEW_EXPERTS),
    "granitemoehybrid": {
        **_FEW_EXPERTS,
        "num_local_experts": 4,
        "shared_intermediate_size": 40,
        "layer_types": ["linear_attention", "full_attention"],
        "position_embedding_type": "rope",
        "mamba_expand": 1,
        "mamba_n_heads": 4,
        "mamba_d_head": 12,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
    },
    "bamba": {
        "mamba_expand": 1,
        "mamba_n_heads": 4,
        "mamba_d_head": 12,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
        "attn_layer_indices": [1],
    },
    "falcon_h1": {
        "mamba_d_ssm": 48,
        "mamba_n_heads": 4,
        "mamba_d_head": 12,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
        "lm_head_multiplier": 0.5,
    },
    "gemma3n_text": {
        "num_hidden_layers": 5,
        "intermediate_size": [68] * 5,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0, 0.0],
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        "num_kv_shared_layers": 1,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "laurel_rank": 4,
        "sliding_window": 8,
        "final_logit_softcapping": 0.5,
    },
    "llama4_text": {
        **_FEW_EXPERTS,
        "intermediate_size_mlp": 68,
        "interleave_moe_layer_step": 2,
        "num_hidden_layers": 4,
    },
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _DELTA),
    "lfm2_moe": {
        **_FEW_EXPERTS,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_hidden_layers": 3,
        "num_dense_layers": 1,
    },
    "lfm2": {"num_hidden_layers": 3, "full_attn_idxs": [1]},
    "granite": {"residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "hyperclovax": {"residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "ministral": {"sliding_window": 8},
    "olmo3": {"num_hidden_layers": 5, "sliding_window": 8},
    "seed_oss": {"residual_dropout": 0.0, "attention_dropout": 0.0},
    "smollm3": {"num_hidden_layers": 5},
    "vaultgemma": {"num_hidden_layers": 3, "sliding_window": 8},
}


def every_tiny_model(family: str, **more: Any) -> Any:
    """`tiny_model` of any architecture that has a row."""
    return tiny_model(family, **({} if family in FAMILIES else {**_DECODER, **OTHER_CONFIGS.get(family, {})}), **more)


def tiny_config(family: str, **more: Any) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **{**FAMILIES.get(family, {}), **more})
    config.use_cache = False
    return config


def tiny_model(
    family: str, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", **more: Any
) -> Any:
    """In training mode, the same weights every time, the norms' among them random."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **more), dtype=dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name or "ln_" in name:
            nn.init.normal_(parameter, mean=parameter.float().mean().item(), std=0.1)
    return model.train().to(device)


def batch(model: nn.Module, *, sequences: int = 2, tokens: int = 9) -> dict[str, Tensor]:
    """Tokens that are their own labels, a few of which are ignored."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (sequences, tokens), generator=generator)
    labels = ids.clone()
    labels[0, :3] = -100
    device = next(model.parameters()).device
    return {"input_ids": ids.to(device), "labels": labels.to(device)}


def train_once(model: Any, **more: Any) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one step."""
    model.zero_grad()
    loss = model(**{**batch(model), **more}).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), gradients


def fingerprint(model: nn.Module) -> list[Any]:
    """Identities of everything a patch could replace: classes, attributes, the modeling module's names."""
    modeling = importlib.import_module(ARCHITECTURES[model.config.model_type].modeling_module)  # type: ignore[union-attr,index]
    found: list[Any] = [(name, id(value)) for name, value in sorted(vars(modeling).items())]
    for name, module in model.named_modules():
        found.append((name, type(module), type(module).forward, type(module).__init__))
        found.extend((name, key, id(value)) for key, value in vars(module).items() if key != "_parameters")
    return found
