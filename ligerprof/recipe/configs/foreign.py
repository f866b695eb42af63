"""Frameworks whose configuration files are not read, by the keys that only their files have."""

from collections.abc import Mapping
from typing import Any

# a file with all keys of one of the sets at its top level is the framework's
_KEYS: Mapping[str, tuple[frozenset[str], ...]] = {
    "verl": (frozenset({"actor_rollout_ref"}),),
    "NeMo RL": (frozenset({"policy", "cluster"}),),
    "NeMo": (frozenset({"exp_manager"}), frozenset({"megatron_cfg"})),
    "Megatron-LM": (frozenset({"tensor_model_parallel_size", "num_layers"}), frozenset({"tensor-model-parallel-size"})),
    "ms-swift": (frozenset({"train_type", "torch_dtype"}), frozenset({"tuner_type"}), frozenset({"rlhf_type"})),
    "nanotron": (frozenset({"parallelism", "tokens", "checkpoints"}),),
    "LitGPT": (frozenset({"checkpoint_dir", "out_dir", "train"}),),
    "PyTorch Lightning": (frozenset({"trainer", "fit"}), frozenset({"trainer", "model", "seed_everything"})),
    "OpenRLHF": (frozenset({"pretrain", "micro_train_batch_size"}),),
}


def foreign_framework(values: Mapping[str, Any]) -> str | None:
    """The name of the framework that is not read and whose keys a file has; None for any other file."""
    # each object of torchtune's files names its class so
    if any(isinstance(value, Mapping) and "_component_" in value for value in values.values()):
        return "torchtune"
    return next((name for name, kinds in _KEYS.items() if any(keys <= values.keys() for keys in kinds)), None)
