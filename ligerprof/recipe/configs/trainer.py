"""transformers' TrainingArguments, versions 4.30 to 5.23, with the arguments of its language-model scripts."""

import re
from collections.abc import Mapping
from typing import Any

from ligerprof.recipe.categories import LengthOrder, Precision
from ligerprof.recipe.configs import rows, shared
from ligerprof.recipe.configs.deepspeed import finish_deepspeed
from ligerprof.recipe.configs.settings import Ignored, Outcome, Reading, Reason, Sets, Setting

# configurations that extend TrainingArguments; a file that fits several is read as the plainest
FAMILY = "transformers"
SIGNATURE = frozenset({"per_device_train_batch_size", "output_dir"})
_ORDERS = {"random": LengthOrder.RANDOM, "group_by_length": LengthOrder.GROUPED, "sequential": LengthOrder.FILE}


def _read_sampling(value: Any) -> Outcome:
    """The order of sequences, which a file of lengths takes."""
    order = _ORDERS.get(value) if isinstance(value, str) else None
    return Ignored(reason=Reason.DATA) if order is None else Sets(values={Setting.LENGTH_ORDER: order})


ROWS: Mapping[str, rows.Row] = {
    **rows.ignored_keys("transformers"),
    "per_device_train_batch_size": rows.count(Setting.BATCH),
    "gradient_accumulation_steps": rows.count(Setting.GRAD_ACCUM, auto=True),
    "max_grad_norm": rows.number(Setting.CLIP),
    "optim": shared.OPTIMIZER,
    "bf16": rows.turned_on({Setting.AUTOCAST: "bf16"}),
    "fp16": rows.turned_on({Setting.AUTOCAST: "fp16"}),
    **rows.each("gradient_checkpointing activation_checkpointing", rows.switch(Setting.CHECKPOINTING)),
    **rows.each("gradient_checkpointing_kwargs activation_checkpointing_kwargs", shared.CHECKPOINTING_KWARGS),
    "deepspeed": shared.DEEPSPEED_SECTION,
    "fsdp": shared.FSDP_SWITCH,
    "fsdp_config": rows.section(shared.FSDP_ROWS, read=rows.file_name("fsdp")),
    "torch_compile": rows.turned_on({Setting.COMPILE: True}),
    **rows.part_of("liger-kernel", "use_liger_kernel liger_kernel_config use_liger"),
    # names of older versions
    "per_gpu_train_batch_size": rows.count(Setting.BATCH),
    "adafactor": rows.turned_on({Setting.OPTIMIZER: "adafactor-hf"}),
    **rows.each("evaluation_strategy eval_strategy do_eval eval_on_start", shared.EVALUATION_STRATEGY),
    "group_by_length": rows.turned_on({Setting.LENGTH_ORDER: LengthOrder.GROUPED}),
    "train_sampling_strategy": rows.Row(read=_read_sampling),
    **rows.each("per_device_eval_batch_size per_gpu_eval_batch_size", rows.count(Setting.EVALUATION_BATCH)),
    **rows.left_out(
        "buckets and options of DDP", "ddp_bucket_cap_mb ddp_static_graph ddp_find_unused_parameters", harmless=(25,)
    ),
    **rows.lacking("NEFTune's noise on embeddings", "neftune_noise_alpha"),
    **rows.lacking("label smoothing", "label_smoothing_factor"),
    **rows.lacking("a search for the batch size", "auto_find_batch_size"),
    **rows.lacking("a key-value cache while training", "use_cache"),
    **rows.lacking("sharded_ddp", "sharded_ddp"),
    **rows.lacking(
        "training on a CPU or TPU",
        "use_cpu no_cuda use_mps_device tpu_num_cores use_ipex",
        remedy="Only training on NVIDIA's GPUs is covered.",
    ),
    **rows.parallelism(tensor="tp_size"),
    **rows.lacking("a configuration of parallelism", "parallelism_config"),
    **rows.part_of("GaLore's options", "optim_args optim_target_modules"),
    "accelerator_config": shared.ACCELERATOR_CONFIG,
    **rows.part_of("part of FSDP", "fsdp_transformer_layer_cls_to_wrap"),
}
# arguments of transformers' run_clm.py and its like
_SCRIPT_ROWS: Mapping[str, rows.Row] = {
    **rows.ignored_keys("transformers", "scripts"),
    "model_name_or_path": rows.text(Setting.MODEL),
    # the last is in scripts that descend from Stanford's Alpaca
    **rows.each("block_size max_seq_length model_max_length", rows.count(Setting.SEQ)),
    **rows.each("dtype torch_dtype", shared.DTYPE),
    "attn_implementation": shared.ATTENTION,
    **rows.lacking("another configuration of the model", "config_name config_overrides"),
}
DEFAULTS: Mapping[Setting, Any] = {
    Setting.BATCH: 8,
    Setting.EVALUATION_BATCH: 8,
    Setting.GRAD_ACCUM: 1,
    Setting.CLIP: 1.0,
    Setting.CHECKPOINTING: False,
    Setting.REENTRANT: False,
    Setting.OPTIMIZER: "adamw-fused",
    Setting.AUTOCAST: "no",
}


def finish(reading: Reading, values: Mapping[str, Any]) -> None:
    """Read what depends on several keys: liger-kernel, FSDP, DeepSpeed in the file, and GaLore."""
    for switch_key in ("use_liger_kernel", "use_liger"):
        if rows.is_on(values, switch_key):
            chosen = shared.liger_names(rows.object_in(values, "liger_kernel_config"), shared.LIGER_DEFAULTS)
            reading.set(switch_key, {Setting.LIGER: chosen, Setting.PROVIDER: "liger"})
    if not rows.is_on(values, "fsdp"):
        # the Trainer reads fsdp_config with fsdp only
        reading.without("fsdp_config")
    else:
        # words in a text or a list
        legacy = " ".join(re.findall(r"\w+", str(values["fsdp"])))
        shared.set_fsdp(reading, "fsdp", values.get("fsdp_config"), version=2, legacy=legacy)
        if "offload" in legacy:
            reading.set("fsdp", {Setting.OFFLOAD: "all"})
    if isinstance(values.get("deepspeed"), Mapping):
        finish_deepspeed(reading, values["deepspeed"], "deepspeed.")
    elif "deepspeed" in reading.files:
        reading.set("deepspeed", {Setting.ENGINE: "deepspeed"}, words=f"the file {values['deepspeed']}")
    if isinstance(values.get("optim_args"), str):
        _set_optimizer_arguments(reading, values["optim_args"])


def _set_optimizer_arguments(reading: Reading, arguments: str) -> None:
    for argument in arguments.split(","):
        name, _, value = argument.partition("=")
        if name.strip() == "momentum" and reading.value(Setting.OPTIMIZER) == "sgd" and rows.real_number(value.strip()):
            reading.set("optim_args", {Setting.OPTIMIZER: "sgd-momentum"})
        if name.strip() == "rank" and value.strip().isdecimal():
            reading.set("optim_args", {Setting.GALORE_RANK: int(value)})


# how the Trainer's arguments write a recipe; other frameworks have most of these keys, too
WRITES: Mapping[str, rows.Spelling] = {
    **rows.as_read(ROWS, "batch grad_accum checkpointing optimizer"),
    "checkpoint_every": shared.write_every,
    "grad_sync": shared.write_grad_sync,
    "precision": lambda recipe: {Precision.AMP: {"bf16": True}, Precision.AMP_FP16: {"fp16": True}}.get(
        recipe.precision
    ),
    "liger": rows.liger(
        {"use_liger_kernel": True},
        fused_loss={
            "use_liger_kernel": True,
            "liger_kernel_config": {
                "fused_linear_cross_entropy": True,
                **dict.fromkeys(("cross_entropy", "rope", "rms_norm", "swiglu", "geglu", "layer_norm"), False),
            },
        },
    ),
}

TRANSFORMERS = rows.Framework(
    name="transformers",
    title="transformers' TrainingArguments",
    family=FAMILY,
    rows={**ROWS, **_SCRIPT_ROWS},
    signature=SIGNATURE | {"block_size", "dataset_config_name", "do_train", "train_file", "tokenizer_name"},
    # from_pretrained of version 5 loads the checkpoint's own dtype
    defaults={**DEFAULTS, Setting.WEIGHTS: "checkpoint"},
    finish=finish,
    writes=WRITES,
)
