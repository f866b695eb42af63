"""The configuration files that frameworks ship under fixed names, for users' files that name them from elsewhere."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

_AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
_BY_MODEL = {
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
}
_ON_CPU = {"device": "cpu", "pin_memory": True}


def _deepspeed(stage: int, **zero: Any) -> Mapping[str, Any]:
    enabled = {"enabled": "auto"}
    return {**_AUTO, "bf16": enabled, "fp16": enabled, "zero_optimization": {"stage": stage, **zero}}


# axolotl's deepspeed_configs/, as of 0.13
_AXOLOTL_2 = {"offload_optimizer": {"device": "cpu"}, "contiguous_gradients": True, "overlap_comm": True}
_AXOLOTL_3 = {
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 0,
    "max_live_parameters": 0,
    "max_reuse_distance": 0,
    "gather_16bit_weights_on_model_save": True,
    **_BY_MODEL,
}


def _axolotl_bf16(**zero: Any) -> Mapping[str, Any]:
    return {**_AUTO, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3, **_AXOLOTL_3, **zero}}


_AXOLOTL = {
    "zero1.json": _deepspeed(1, overlap_comm=True),
    "zero2.json": _deepspeed(2, **_AXOLOTL_2),
    "zero3.json": _deepspeed(3, **_AXOLOTL_3),
    "zero3_bf16.json": _axolotl_bf16(),
    "zero3_bf16_cpuoffload_all.json": _axolotl_bf16(offload_optimizer=_ON_CPU, offload_param=_ON_CPU),
    "zero3_bf16_cpuoffload_params.json": _axolotl_bf16(offload_param=_ON_CPU),
}
# LLaMA-Factory's examples/deepspeed/, as of 0.9.4
_FACTORY_2 = {
    "allgather_bucket_size": 5e8,
    "reduce_bucket_size": 5e8,
    "contiguous_gradients": True,
    "overlap_comm": False,
}
_FACTORY_3 = {
    "overlap_comm": False,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
    **_BY_MODEL,
}
_LLAMA_FACTORY = {
    "ds_z0_config.json": _deepspeed(0, **_FACTORY_2),
    "ds_z2_config.json": _deepspeed(2, **_FACTORY_2),
    "ds_z2_offload_config.json": _deepspeed(2, offload_optimizer=_ON_CPU, **_FACTORY_2),
    "ds_z3_config.json": _deepspeed(3, **_FACTORY_3),
    "ds_z3_offload_config.json": _deepspeed(3, offload_optimizer=_ON_CPU, offload_param=_ON_CPU, **_FACTORY_3),
}


def _accelerate(kind: str, **more: Any) -> Mapping[str, Any]:
    return {"distributed_type": kind, "mixed_precision": "bf16", "num_processes": 8, **more}


# trl/accelerate_configs/, which `accelerate_config` names without a folder
TRL_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "single_gpu": _accelerate("NO"),
    "multi_gpu": _accelerate("MULTI_GPU"),
    "fsdp1": _accelerate("FSDP", fsdp_config={"fsdp_version": 1}),
    "fsdp2": _accelerate("FSDP", fsdp_config={"fsdp_version": 2, "fsdp_reshard_after_forward": True}),
    "zero1": _accelerate("DEEPSPEED", deepspeed_config={"zero_stage": 1, "gradient_accumulation_steps": 1}),
    "zero2": _accelerate("DEEPSPEED", deepspeed_config={"zero_stage": 2}),
    "zero3": _accelerate("DEEPSPEED", deepspeed_config={"zero_stage": 3, "zero3_save_16bit_model": True}),
}
_SHIPPED: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "axolotl": _AXOLOTL,
    "llama-factory": _LLAMA_FACTORY,
    **dict.fromkeys(("trl-sft", "trl-dpo", "trl-reward", "trl-rl"), TRL_PRESETS),
}


def shipped_file(framework: str, name: str) -> Mapping[str, Any] | None:
    """What the file of this name holds that the framework ships; None if it ships none."""
    return _SHIPPED.get(framework, {}).get(PurePath(name).name)
