"""Frameworks whose configuration files are not read, by the keys that only their files have."""

from collections.abc import Mapping
from typing import Any

# a file with all keys of one of the sets at its top level is the framework's
_KEYS: Mapping[str, tuple[frozenset[str], ...]] = {
    "verl": (frozenset({"actor_rollout_ref"}), frozenset({"data", "optim", "engine", "trainer"})),
    "NeMo RL": (frozenset({"policy", "cluster"}),),
    "NeMo": (frozenset({"exp_manager"}), frozenset({"megatron_cfg"})),
    "Megatron-LM": (frozenset({"tensor_model_parallel_size", "num_layers"}), frozenset({"tensor-model-parallel-size"})),
    "ms-swift": (
        *(frozenset({key, "torch_dtype"}) for key in ("train_type", "sft_type")),
        *(frozenset({key}) for key in ("tuner_type", "rlhf_type", "tuner_backend", "template_type")),
        frozenset({"sft_type", "model_type"}),
    ),
    "nanotron": (frozenset({"parallelism", "tokens", "checkpoints"}),),
    "LitGPT": (frozenset({"checkpoint_dir", "out_dir", "train"}),),
    "PyTorch Lightning": (frozenset({"trainer", "fit"}), frozenset({"trainer", "model", "seed_everything"})),
    "OpenRLHF": (frozenset({"pretrain", "micro_train_batch_size"}),),
    "LLaVA": (frozenset({"vision_tower"}), frozenset({"mm_projector_type"})),
    "InternVL": (frozenset({"freeze_llm", "freeze_backbone"}),),
    "Qwen-VL": (frozenset({"tune_mm_vision"}), frozenset({"tune_mm_llm"})),
    # its keys may have hyphens or underscores
    "GPT-NeoX": (
        *(frozenset({f"pipe{mark}parallel{mark}size"}) for mark in "-_"),
        *(frozenset({f"num{mark}layers", f"pos{mark}emb"}) for mark in "-_"),
        *(frozenset({f"train{mark}data{mark}paths"}) for mark in "-_"),
        *(frozenset({f"data{mark}path", f"vocab{mark}file"}) for mark in "-_"),
    ),
    "LLM Foundry": (
        frozenset({"max_duration", "train_loader"}),
        frozenset({"max_duration", "device_train_microbatch_size"}),
        frozenset({"icl_tasks", "device_eval_batch_size"}),
    ),
    "EasyR1": (frozenset({"worker", "algorithm"}), frozenset({"worker", "trainer", "data"})),
}


def foreign_framework(values: Mapping[str, Any]) -> str | None:
    """The name of the framework that is not read and whose keys a file has; None for any other file."""
    # each object of torchtune's files names its class so
    if any(isinstance(value, Mapping) and "_component_" in value for value in values.values()):
        return "torchtune"
    # verl's trainer of supervised fine-tuning, whose sections have common names
    model = values.get("model")
    if isinstance(model, Mapping) and "partial_pretrain" in model:
        return "verl"
    return next((name for name, kinds in _KEYS.items() if any(keys <= values.keys() for keys in kinds)), None)
