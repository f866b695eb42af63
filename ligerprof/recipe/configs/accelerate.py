"""accelerate's YAML of `accelerate config`, and the environment that its launcher gives to processes."""

from collections.abc import Mapping
from typing import Any

from ligerprof.recipe.categories import Engine, Precision
from ligerprof.recipe.configs import rows, shared
from ligerprof.recipe.configs.deepspeed import set_offload
from ligerprof.recipe.configs.settings import Reading, Setting

_SINGLE = {"": "torch", "no": "torch", "false": "torch", "single_gpu": "torch"}
_DEEPSPEED = {
    **rows.ignored_keys("accelerate", "deepspeed_config"),
    "zero_stage": rows.count(Setting.ZERO, least=0),
    "gradient_accumulation_steps": rows.count(Setting.GRAD_ACCUM, auto=True),
    "gradient_clipping": rows.number(Setting.CLIP, auto=True),
    "deepspeed_config_file": rows.Row(read=rows.file_name("deepspeed")),
    **rows.part_of(
        "offload", "offload_optimizer_device offload_param_device offload_optimizer_nvme_path offload_param_nvme_path"
    ),
    "zero3_save_16bit_model": rows.switch(Setting.SAVE_WHOLE),
}
_PARALLELISM = {
    **rows.ignored_keys("accelerate", "parallelism_config"),
    "dp_replicate_size": rows.count(Setting.REPLICATE),
    **rows.part_of("data parallelism", "dp_shard_size"),
    **rows.parallelism(tensor="tp_size", context="cp_size", sequence="sp_size", expert="ep_size"),
}
_DYNAMO = {
    **rows.ignored_keys("accelerate", "dynamo_config"),
    "dynamo_backend": rows.words(
        Setting.COMPILE, {"no": rows.UNSET, "eager": rows.UNSET, "inductor": True}, what="torch.compile with"
    ),
}
_ROWS: Mapping[str, rows.Row] = {
    **rows.ignored_keys("accelerate"),
    "distributed_type": rows.words(
        Setting.ENGINE,
        {**_SINGLE, "multi_gpu": "ddp", "deepspeed": "deepspeed", "fsdp": "fsdp1"},
        what="distributed_type",
    ),
    "mixed_precision": rows.words(
        Setting.AUTOCAST,
        {"no": rows.UNSET, "false": rows.UNSET, "bf16": "bf16", "fp16": "fp16"},
        what="mixed precision in",
    ),
    # a key of the oldest versions
    "fp16": rows.turned_on({Setting.AUTOCAST: "fp16"}),
    "num_processes": rows.count(Setting.GPUS),
    "gradient_accumulation_steps": rows.count(Setting.GRAD_ACCUM, auto=True),
    "deepspeed_config": rows.section(_DEEPSPEED),
    "fsdp_config": rows.section(shared.FSDP_ROWS),
    "parallelism_config": rows.section(
        {**_PARALLELISM, **{f"parallelism_config_{name}": row for name, row in _PARALLELISM.items()}}
    ),
    "dynamo_config": rows.section({**_DYNAMO, **{name.removeprefix("dynamo_"): row for name, row in _DYNAMO.items()}}),
    **_DYNAMO,
    **rows.lacking("Megatron-LM", "megatron_lm_config"),
    **rows.lacking("training on a CPU", "use_cpu"),
    **rows.lacking("KTransformers, which trains experts on the CPU", "kt_config"),
}


# sections that accelerate reads for some values of distributed_type
_OF_TYPES: Mapping[str, tuple[str, ...]] = {
    "deepspeed_config": ("deepspeed",),
    "fsdp_config": ("fsdp",),
    "megatron_lm_config": ("megatron_lm",),
}


def finish_accelerate(reading: Reading, values: Mapping[str, Any]) -> None:
    """Read what depends on several keys: FSDP's version, and DeepSpeed's offload and sizes."""
    kind = str(values.get("distributed_type", "")).lower()
    if kind == "fsdp":
        of_fsdp = {"fsdp_auto_wrap_policy": "NO_WRAP", **rows.object_in(values, "fsdp_config")}
        shared.set_fsdp(reading, "distributed_type", of_fsdp, version=1)
    for name, kinds in _OF_TYPES.items():
        if kind not in kinds:
            reading.without(name)
    section_ = values.get("deepspeed_config")
    if kind == "deepspeed" and isinstance(section_, Mapping):
        _finish_deepspeed(reading, section_)
    if kind in _SINGLE and "distributed_type" in values:
        # accelerate starts one process, whatever num_processes says
        reading.settings.pop(Setting.GPUS, None)
    if str(values.get("mixed_precision")).lower() == "fp8":
        reading.lack("mixed_precision", "fp8 training", value="fp8")
        reading.settings.pop(Setting.AUTOCAST, None)


def _finish_deepspeed(reading: Reading, section_: Mapping[str, Any]) -> None:
    if "deepspeed_config_file" in section_:
        return
    places = {part: section_.get(f"offload_{part}_device") for part in ("optimizer", "param")}
    words_ = {part: "none" if rows.is_off(place) else str(place).lower() for part, place in places.items()}
    # DeepSpeedPlugin's default
    stage = section_.get("zero_stage", 2)
    set_offload(reading, "deepspeed_config.offload", stage=stage, optimizer=words_["optimizer"], param=words_["param"])
    path = section_.get("offload_param_nvme_path") or section_.get("offload_optimizer_nvme_path")
    if "nvme" in words_.values() and isinstance(path, str):
        reading.set("deepspeed_config.offload_param_nvme_path", {Setting.NVME_PATH: path})
    # accelerate leaves the rest to DeepSpeed, whose default depends on the stage
    overlaps = str(section_.get("zero_stage")) == "3"
    reading.imply("deepspeed_config", {Setting.DEEPSPEED: {"zero_optimization": {"overlap_comm": overlaps}}})


def _write_for_deepspeed(key: str, name: str) -> rows.Spelling:
    """A key that only DeepSpeed reads: elsewhere the program passes it to Accelerator."""
    return lambda recipe: (
        {f"deepspeed_config.{key}": getattr(recipe, name)} if recipe.engine is Engine.DEEPSPEED else None
    )


_MIXED = {Precision.AMP: "bf16", Precision.AMP_FP16: "fp16", Precision.MIXED: "bf16"}

ACCELERATE = rows.Framework(
    name="accelerate",
    title="a configuration of accelerate",
    rows=_ROWS,
    signature=frozenset(
        {"distributed_type", "compute_environment", "num_processes", "mixed_precision", "machine_rank", "fsdp_config"}
    ),
    defaults={Setting.AUTOCAST: "no"},
    is_complete=False,
    finish=finish_accelerate,
    writes={
        "grad_accum": _write_for_deepspeed("gradient_accumulation_steps", "grad_accum"),
        "clip": _write_for_deepspeed("gradient_clipping", "clip"),
        "precision": lambda recipe: (
            {"mixed_precision": _MIXED[recipe.precision]} if recipe.precision in _MIXED else None
        ),
    },
)

_SECTIONS = (
    ("ACCELERATE_DEEPSPEED_", "deepspeed_config", ""),
    ("FSDP_", "fsdp_config", "fsdp_"),
    ("PARALLELISM_CONFIG_", "parallelism_config", ""),
    ("ACCELERATE_DYNAMO_", "dynamo_config", "dynamo_"),
)
_TYPES = {"ACCELERATE_USE_DEEPSPEED": "DEEPSPEED", "ACCELERATE_USE_FSDP": "FSDP"}
_TOP = {
    "ACCELERATE_MIXED_PRECISION": "mixed_precision",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    "ACCELERATE_USE_CPU": "use_cpu",
    "WORLD_SIZE": "num_processes",
}
_ENVIRONMENT_NAMES = {
    "config_file": "deepspeed_config_file",
    "zero3_init": "zero3_init_flag",
    "fsdp_transformer_cls_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
}


def values_of_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """The keys of accelerate's YAML that match the environment of a launched process."""
    values: dict[str, Any] = {}
    for variable, text in environment.items():
        if variable in _TOP:
            values[_TOP[variable]] = text
        for start, name, prefix in _SECTIONS:
            if variable.startswith(start):
                key = prefix + variable.removeprefix(start).lower()
                values.setdefault(name, {})[_ENVIRONMENT_NAMES.get(key, key)] = text
    types = [kind for variable, kind in _TYPES.items() if rows.is_on(environment, variable)]
    several = rows.is_on(environment, "WORLD_SIZE") and environment["WORLD_SIZE"] != "1"
    if values:
        values["distributed_type"] = types[0] if types else "MULTI_GPU" if several else "NO"
    return values
