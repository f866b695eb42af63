"""DeepSpeed's JSON, a file of its own or a section of another file; `auto` leaves a value to the other files."""

from collections.abc import Mapping
from typing import Any

from ligerprof.models import ModelSpec
from ligerprof.recipe.configs import rows
from ligerprof.recipe.configs.settings import Outcome, Reading, Sets, Setting
from ligerprof.recipe.deepspeed import ZERO_SETTINGS, leaves

# what HF fills with sizes that follow from the model, where the file says `auto`
HIDDEN_SIZE_KEYS = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
# names of the sizes in older versions
_FORMER_NAMES = {
    "param_persistence_threshold": "stage3_param_persistence_threshold",
    "max_live_parameters": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
}
_PLACES = ("none", "cpu", "nvme")
_COMMUNICATION = {
    name: short
    for short, long, other in (("bf16", "bfloat16", "bfp16"), ("fp16", "float16", "half"), ("fp32", "float32", "float"))
    for name in (short, long, other)
}
# the stage of ZeRO
_OFFLOADS_PARAMETERS = 3


def _enabled(dtype: str) -> rows.Row:
    def read(value: Any) -> Outcome:
        if value == "auto":
            return rows.noted("left to the other files")
        return Sets(values={Setting.AUTOCAST: dtype}) if rows.truth(value) else rows.UNSET

    return rows.Row(read=read)


def _size(value: Any) -> Outcome:
    if value == "auto":
        return rows.noted("filled from the model")
    return rows.noted(f"{rows.whole_number(value):,} elements")


def _place(value: Any) -> Outcome:
    if value not in _PLACES:
        raise rows.BadValueError("not one of none, cpu and nvme")
    return rows.noted("offload")


_OFFLOAD = {
    **rows.ignored_keys("deepspeed", "offload"),
    "device": rows.Row(read=_place),
    **rows.part_of("the folder of the offload", "nvme_path"),
    **rows.part_of("host memory of the offload", "pin_memory buffer_count buffer_size max_in_cpu"),
    **rows.lacking("an optimizer offloaded in part", "ratio", harmless=(1, 1.0)),
}
_ZERO = {
    **rows.ignored_keys("deepspeed", "zero_optimization"),
    "stage": rows.count(Setting.ZERO, least=0),
    **rows.each("offload_optimizer offload_param", rows.section(_OFFLOAD)),
    "overlap_comm": rows.Row(read=lambda value: rows.noted(f"overlap {'on' if rows.truth(value) else 'off'}")),
    **{
        name: rows.Row(read=_size)
        for name in (*ZERO_SETTINGS, *_FORMER_NAMES)
        if name not in ("overlap_comm", "contiguous_gradients")
    },
    "contiguous_gradients": rows.Row(read=lambda value: Sets(values={}, words="on" if rows.truth(value) else "off")),
    **rows.each(
        "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save"
        " gather_16bit_weights_on_model_save",
        rows.switch(Setting.SAVE_WHOLE, auto=True),
    ),
    # names of older versions
    **rows.part_of("offload", "cpu_offload cpu_offload_params"),
    **rows.lacking("secondary partitions of ZeRO++", "zero_hpz_partition_size", harmless=(1,)),
    **rows.lacking(
        "quantized communication of ZeRO++",
        "zero_quantized_weights zero_quantized_gradients zero_quantized_nontrainable_weights",
    ),
    **rows.lacking("MiCS", "mics_shard_size mics_hierarchical_params_gather", harmless=(-1,)),
    **rows.lacking("ZenFlow", "zenflow"),
    **rows.lacking("leaf modules of ZeRO-3", "leaf_module"),
    **rows.lacking("hybrid gradient buckets", "memory_efficient_linear", harmless=(True,)),
}
_FP16 = {
    **rows.ignored_keys("deepspeed", "fp16"),
    "enabled": _enabled("fp16"),
    **rows.lacking("master weights in 16 bits", "fp16_master_weights_and_grads"),
}
_BF16 = {
    **rows.ignored_keys("deepspeed", "bf16"),
    "enabled": _enabled("bf16"),
    **rows.lacking("master weights in 16 bits", "bf16_master_weights_and_grads bf16_optimizer_states"),
    **rows.lacking("gradients accumulated in another dtype", "immediate_grad_update", harmless=(True,)),
}
DEEPSPEED_ROWS: Mapping[str, rows.Row] = {
    **rows.ignored_keys("deepspeed"),
    "train_micro_batch_size_per_gpu": rows.count(Setting.BATCH, auto=True),
    "gradient_accumulation_steps": rows.count(Setting.GRAD_ACCUM, auto=True),
    "train_batch_size": rows.count(Setting.TRAIN_BATCH, auto=True),
    "gradient_clipping": rows.number(Setting.CLIP, auto=True),
    "zero_optimization": rows.section(_ZERO),
    "fp16": rows.section(_FP16),
    **rows.each("bf16 bfloat16", rows.section(_BF16)),
    "optimizer": rows.section(
        {"type": rows.words(Setting.OPTIMIZER, rows.DEEPSPEED_OPTIMIZERS, what="optimizer")},
        ignored="deepspeed.optimizer",
    ),
    "compile": rows.section(rows.lacking("torch.compile", "deepcompile"), ignored="deepspeed.compile"),
    "data_types": rows.section(
        rows.lacking("gradients accumulated in another dtype", "grad_accum_dtype", harmless=("auto",))
    ),
    "torch_autocast": rows.section(
        rows.lacking("torch's autocast under DeepSpeed", "enabled"), ignored="deepspeed.torch_autocast"
    ),
    "autotuning": rows.section(
        rows.lacking("DeepSpeed's autotuner, which chooses batch and stage", "enabled"), ignored="deepspeed.autotuning"
    ),
    "tensor_parallel": rows.section(rows.parallelism(tensor="autotp_size tp_size tp")),
    **rows.parallelism(sequence="sequence_parallel_size"),
    **rows.part_of("dtype of the communication", "communication_data_type"),
    **rows.lacking("communication in another dtype", "fp32_allreduce"),
    **rows.lacking("sparse gradients", "sparse_gradients"),
    **rows.lacking("sparse attention", "sparse_attention"),
    **rows.lacking("compressed training", "compression_training quantize_training"),
    **rows.lacking("data efficiency (random layer-token dropping)", "data_efficiency curriculum_learning"),
    **rows.lacking("progressive layer dropping", "progressive_layer_drop eigenvalue"),
    **rows.lacking("NVIDIA's apex", "amp"),
    **rows.lacking("the hybrid engine", "hybrid_engine"),
    **rows.lacking("elastic training", "elasticity"),
    **rows.lacking("DeepSpeed's inference engine", "tensor_parallel_inference kernel_inject"),
}


def finish_deepspeed(reading: Reading, values: Mapping[str, Any], prefix: str = "") -> None:
    """Read what depends on several keys: engine, offload, sizes and the kind of Adam; `prefix` is as `deepspeed.`."""
    zero = rows.object_in(values, "zero_optimization")
    reading.set(f"{prefix}zero_optimization", {Setting.ENGINE: "deepspeed"})
    _set_offload(reading, zero, f"{prefix}zero_optimization.offload")
    reading.imply(f"{prefix}zero_optimization", {Setting.DEEPSPEED: {"zero_optimization": _sizes(zero)}})
    flat = dict(leaves(values))
    if not reading.is_complete and "auto" in (flat.get("bf16.enabled"), flat.get("fp16.enabled")):
        reading.defaults[Setting.AUTOCAST] = "auto"
    _judge_communication(reading, values, prefix)
    if any(not rows.is_off(value) for _, value in leaves({"": values.get("activation_checkpointing")})):
        reading.assumed.append(
            f"{prefix}activation_checkpointing has no effect: models of transformers checkpoint without DeepSpeed"
        )
    if flat.get("optimizer.params.torch_adam") is True and reading.value(Setting.OPTIMIZER) == "default":
        reading.set(f"{prefix}optimizer.params.torch_adam", {Setting.OPTIMIZER: "adamw-foreach"})


def _judge_communication(reading: Reading, values: Mapping[str, Any], prefix: str) -> None:
    """Name another dtype of the communication than that of the training (engine.py, communication_data_type)."""
    key = "communication_data_type"
    if not rows.is_on(values, key) or values[key] == "auto":
        return
    word = _COMMUNICATION.get(str(values[key]).strip().lower())
    training = {reading.value(Setting.AUTOCAST) or "fp32"}
    sections = ((name, values.get(name)) for name in ("bf16", "fp16"))
    left_open = {name for name, each in sections if isinstance(each, Mapping) and each.get("enabled") == "auto"}
    if word not in (left_open or training):
        reading.lack(f"{prefix}{key}", "communication in another dtype", value=values[key])
    elif left_open:
        reading.assumed.append(f"{prefix}{key} of {word} is the dtype of the training")


def _sizes(zero: Mapping[str, Any]) -> dict[str, Any]:
    """ZeRO's settings that the recipe passes on, those of the model's size still as `auto`."""
    named = {_FORMER_NAMES.get(name, name): value for name, value in zero.items()}
    kept = {name: value for name, value in named.items() if name in ZERO_SETTINGS and value is not None}
    # DeepSpeed's own default depends on the stage
    kept.setdefault("overlap_comm", str(zero.get("stage", 0)) == "3")
    return {
        name: rows.truth(value)
        if isinstance(ZERO_SETTINGS[name], bool)
        else value
        if value == "auto"
        else rows.whole_number(value)
        for name, value in kept.items()
        if value != "auto" or name in HIDDEN_SIZE_KEYS
    }


def _set_offload(reading: Reading, zero: Mapping[str, Any], key: str) -> None:
    places = {}
    for part in ("optimizer", "param"):
        inner = rows.object_in(zero, f"offload_{part}")
        older = {"optimizer": "cpu_offload", "param": "cpu_offload_params"}[part]
        device = inner.get("device") or ("cpu" if rows.is_on(zero, older) else "none")
        places[part] = str(device)
        if places[part] == "nvme" and isinstance(inner.get("nvme_path"), str):
            reading.set(f"{key}_{part}.nvme_path", {Setting.NVME_PATH: inner["nvme_path"]})
    set_offload(reading, key, stage=zero.get("stage", 0), optimizer=places["optimizer"], param=places["param"])


def set_offload(reading: Reading, key: str, *, stage: Any, optimizer: str, param: str) -> None:
    """Set the offload from ZeRO's stage and the places `none`, `cpu` or `nvme`; `key` ends before the part's name."""
    if param != "none" and rows.whole_number(stage) < _OFFLOADS_PARAMETERS:
        # engine.py gives offload_param to ZeRO-3's optimizers alone
        reading.assumed.append(f"{key}_param has no effect: DeepSpeed offloads parameters in stage 3 only")
        param = "none"
    known = {("none", "none"): None, ("cpu", "none"): "optimizer", ("cpu", "cpu"): "all", ("nvme", "nvme"): "nvme"}
    word = known.get((optimizer, param), "lacking")
    if word == "lacking":
        what = f"an offload of the optimizer to {optimizer} and of parameters to {param}"
        reading.lack(f"{key}_param", what, setting=Setting.OFFLOAD)
    elif word is not None:
        reading.set(f"{key}_{'optimizer' if param == 'none' else 'param'}", {Setting.OFFLOAD: word})


def filled(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """DeepSpeed's settings with `auto` replaced as transformers replaces it (integrations/deepspeed.py)."""
    squared = spec.hidden_size * spec.hidden_size
    automatic = dict(zip(HIDDEN_SIZE_KEYS, (squared, int(0.9 * squared), 10 * spec.hidden_size), strict=True))
    sizes = config.get("zero_optimization", {})
    filled = {name: automatic[name] if value == "auto" else value for name, value in sizes.items()}
    return {**config, "zero_optimization": filled} if filled else dict(config)


DEEPSPEED = rows.Framework(
    name="deepspeed",
    title="a DeepSpeed configuration",
    rows=DEEPSPEED_ROWS,
    signature=frozenset({"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "steps_per_print"}),
    defaults={Setting.CLIP: 0.0, Setting.GRAD_ACCUM: 1},
    is_complete=False,
    finish=finish_deepspeed,
    # its own file, next to one of another framework or of none
    writes={},
)
