"""transformers' TrainingArguments, versions 4.30 to 5.23, with the arguments of its language-model scripts."""

from collections.abc import Mapping
from typing import Any

from ligerprof.recipe.categories import LengthOrder
from ligerprof.recipe.configs.deepspeed import finish_deepspeed
from ligerprof.recipe.configs.framework import Framework
from ligerprof.recipe.configs.rows import (
    Row,
    count,
    file_name,
    ignored,
    is_off,
    lacking,
    left_out,
    number,
    part_of,
    real_number,
    section,
    switch,
    text,
    turned_on,
)
from ligerprof.recipe.configs.settings import Ignored, Outcome, Reading, Reason, Sets, Setting
from ligerprof.recipe.configs.sharding import FSDP_ROWS, set_fsdp
from ligerprof.recipe.configs.shared import (
    ATTENTION,
    CHECKPOINTING_KWARGS,
    DEEPSPEED_SECTION,
    DTYPE,
    EVALUATION_STRATEGY,
    FSDP_SWITCH,
    LIGER_DEFAULTS,
    OPTIMIZER,
    liger_names,
)

# configurations that extend TrainingArguments; a file that fits several is read as the plainest
FAMILY = "transformers"
TRAINER_SIGNATURE = frozenset({"per_device_train_batch_size", "output_dir"})
_ORDERS = {
    "random": LengthOrder.RANDOM,
    "group_by_length": LengthOrder.GROUPED,
    "sequential": LengthOrder.FILE,
}


def _read_sampling(value: Any) -> Outcome:
    """The order of sequences, which a file of lengths takes."""
    order = _ORDERS.get(value) if isinstance(value, str) else None
    return Ignored(reason=Reason.DATA) if order is None else Sets(values={Setting.LENGTH_ORDER: order})


TRAINER_ROWS: Mapping[str, Row] = {
    "per_device_train_batch_size": count(Setting.BATCH),
    "gradient_accumulation_steps": count(Setting.GRAD_ACCUM, auto=True),
    "max_grad_norm": number(Setting.CLIP),
    "optim": OPTIMIZER,
    "bf16": turned_on({Setting.AUTOCAST: "bf16"}),
    "fp16": turned_on({Setting.AUTOCAST: "fp16"}),
    "gradient_checkpointing": switch(Setting.CHECKPOINTING),
    "activation_checkpointing": switch(Setting.CHECKPOINTING),
    "gradient_checkpointing_kwargs": CHECKPOINTING_KWARGS,
    "activation_checkpointing_kwargs": CHECKPOINTING_KWARGS,
    "deepspeed": DEEPSPEED_SECTION,
    "fsdp": FSDP_SWITCH,
    "fsdp_config": section(FSDP_ROWS, read=file_name("fsdp")),
    "torch_compile": turned_on({Setting.COMPILE: True}),
    **part_of("liger-kernel", "use_liger_kernel liger_kernel_config use_liger"),
    # names of older versions
    "per_gpu_train_batch_size": count(Setting.BATCH),
    "adafactor": turned_on({Setting.OPTIMIZER: "adafactor-hf"}),
    "evaluation_strategy": EVALUATION_STRATEGY,
    "eval_strategy": EVALUATION_STRATEGY,
    "group_by_length": turned_on({Setting.LENGTH_ORDER: LengthOrder.GROUPED}),
    "train_sampling_strategy": Row(read=_read_sampling),
    "do_eval": EVALUATION_STRATEGY,
    "eval_on_start": EVALUATION_STRATEGY,
    "per_device_eval_batch_size": count(Setting.EVALUATION_BATCH),
    "per_gpu_eval_batch_size": count(Setting.EVALUATION_BATCH),
    **left_out(
        "buckets and options of DDP", "ddp_bucket_cap_mb ddp_static_graph ddp_find_unused_parameters", harmless=(25,)
    ),
    **lacking("NEFTune's noise on embeddings", "neftune_noise_alpha"),
    **lacking("label smoothing", "label_smoothing_factor"),
    **lacking("a search for the batch size", "auto_find_batch_size"),
    **lacking("a key-value cache while training", "use_cache"),
    **lacking("sharded_ddp", "sharded_ddp"),
    **lacking(
        "training on a CPU or TPU",
        "use_cpu no_cuda use_mps_device tpu_num_cores use_ipex",
        remedy="Only training on NVIDIA's GPUs is covered.",
    ),
    **lacking("tensor parallelism", "tp_size", harmless=(1,)),
    **lacking("a parallelism configuration in the arguments", "parallelism_config"),
    **part_of("GaLore's options", "optim_args optim_target_modules"),
    "accelerator_config": section(
        {
            **ignored(Reason.DATA, "split_batches dispatch_batches even_batches non_blocking use_seedable_sampler"),
            **ignored(Reason.NUMBER, "gradient_accumulation_kwargs"),
            **ignored(Reason.LAUNCH, "use_configured_state"),
        }
    ),
    **ignored(Reason.OTHER_METHOD, "torch_compile_backend torch_compile_mode torchdynamo fsdp_min_num_params"),
    **part_of("part of FSDP", "fsdp_transformer_layer_cls_to_wrap"),
    **ignored(
        Reason.SCHEDULE,
        "num_train_epochs max_steps learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps warmup_ratio",
    ),
    **ignored(Reason.NUMBER, "weight_decay adam_beta1 adam_beta2 adam_epsilon average_tokens_across_devices"),
    **ignored(
        Reason.SPEED, "tf32 torch_empty_cache_steps fp16_opt_level half_precision_backend fp16_backend fp16_full_eval"
    ),
    **ignored(
        Reason.EVALUATION,
        "eval_steps eval_delay prediction_loss_only"
        " eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics"
        " include_inputs_for_metrics do_predict bf16_full_eval load_best_model_at_end metric_for_best_model"
        " greater_is_better jit_mode_eval past_index predict_with_generate",
    ),
    **ignored(
        Reason.OUTPUT,
        "output_dir overwrite_output_dir logging_dir logging_strategy logging_steps logging_first_step log_on_each_node"
        " logging_nan_inf_filter include_num_input_tokens_seen include_tokens_per_second log_level log_level_replica"
        " disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id"
        " push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision"
        " push_to_hub_model_id push_to_hub_organization push_to_hub_token",
    ),
    **ignored(
        Reason.SAVING,
        "save_only_model save_strategy save_steps save_on_each_node save_total_limit save_safetensors"
        " enable_jit_checkpoint resume_from_checkpoint ignore_data_skip restore_callback_states_from_checkpoint"
        " overwrite_cache",
    ),
    **ignored(Reason.RANDOM, "seed data_seed full_determinism"),
    **ignored(
        Reason.DATA,
        "dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers"
        " dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order remove_unused_columns"
        " label_names length_column_name dispatch_batches split_batches",
    ),
    **ignored(
        Reason.LAUNCH,
        "ddp_broadcast_buffers ddp_backend xpu_backend ddp_timeout do_train local_rank _n_gpu mp_parameters ray_scope"
        " deepspeed_plugin distributed_state __cached__setup_devices",
    ),
    **ignored(Reason.CHECKS, "debug skip_memory_metrics use_legacy_prediction_loop"),
}
# arguments of transformers' run_clm.py and its like
_SCRIPT_ROWS: Mapping[str, Row] = {
    "model_name_or_path": text(Setting.MODEL),
    "block_size": count(Setting.SEQ),
    "max_seq_length": count(Setting.SEQ),
    # of scripts that descend from Stanford's Alpaca
    "model_max_length": count(Setting.SEQ),
    "dtype": DTYPE,
    "torch_dtype": DTYPE,
    "attn_implementation": ATTENTION,
    **ignored(
        Reason.DATA,
        "dataset_name dataset_config_name train_file validation_file max_train_samples max_eval_samples streaming"
        " preprocessing_num_workers validation_split_percentage keep_linebreaks tokenizer_name use_fast_tokenizer",
    ),
    **ignored(Reason.LOADING, "cache_dir model_revision token use_auth_token trust_remote_code low_cpu_mem_usage"),
    **lacking("another configuration of the model", "config_name config_overrides"),
}
TRAINER_DEFAULTS: Mapping[Setting, Any] = {
    Setting.BATCH: 8,
    Setting.EVALUATION_BATCH: 8,
    Setting.GRAD_ACCUM: 1,
    Setting.CLIP: 1.0,
    Setting.CHECKPOINTING: False,
    Setting.REENTRANT: False,
    Setting.OPTIMIZER: "adamw-fused",
    Setting.AUTOCAST: "no",
}


def finish_trainer(reading: Reading, values: Mapping[str, Any]) -> None:
    """Read what depends on several keys: liger-kernel, FSDP, DeepSpeed in the file, and GaLore."""
    for switch_key in ("use_liger_kernel", "use_liger"):
        if not is_off(values.get(switch_key)):
            details = values.get("liger_kernel_config")
            chosen = liger_names(details if isinstance(details, Mapping) else {}, LIGER_DEFAULTS)
            reading.set(switch_key, {Setting.LIGER: chosen, Setting.PROVIDER: "liger"})
    if is_off(values.get("fsdp")):
        # the Trainer reads fsdp_config with fsdp only
        reading.without("fsdp_config")
    else:
        set_fsdp(reading, "fsdp", values.get("fsdp_config"), version=2)
        legacy = str(values["fsdp"])
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
        if name.strip() == "momentum" and reading.value(Setting.OPTIMIZER) == "sgd" and real_number(value.strip()):
            reading.set("optim_args", {Setting.OPTIMIZER: "sgd-momentum"})
        if name.strip() == "rank" and value.strip().isdecimal():
            reading.set("optim_args", {Setting.GALORE_RANK: int(value)})


TRANSFORMERS = Framework(
    name="transformers",
    title="transformers' TrainingArguments",
    family=FAMILY,
    rows={**TRAINER_ROWS, **_SCRIPT_ROWS},
    signature=TRAINER_SIGNATURE | {"block_size", "dataset_config_name", "do_train", "train_file", "tokenizer_name"},
    # from_pretrained of version 5 loads the checkpoint's own dtype
    defaults={**TRAINER_DEFAULTS, Setting.WEIGHTS: "checkpoint"},
    finish=finish_trainer,
)
