"""LLaMA-Factory's YAML of version 0 (`stage`, `finetuning_type`, …), and of version 1 (`dist_config`, …) by name."""

from collections.abc import Mapping
from typing import Any

from ligerprof.recipe.configs.framework import Framework
from ligerprof.recipe.configs.refusals import NO_TRAINING, OTHER_METHOD, OTHER_TRAINING
from ligerprof.recipe.configs.rows import (
    Row,
    count,
    ignored,
    is_off,
    lacking,
    left_out,
    number,
    part_of,
    section,
    switch,
    text,
    turned_on,
    words,
)
from ligerprof.recipe.configs.settings import EMBEDDING_AND_HEAD, Ignored, Lacking, Packing, Reading, Reason, Setting
from ligerprof.recipe.configs.shared import (
    ATTENTION,
    LIGER_DEFAULTS,
    LORA_DROPOUT,
    METRICS,
    OPTIMIZER,
    modules,
    modules_at,
    whole_number_at,
    without_adapter,
)
from ligerprof.recipe.configs.trainer import TRAINER_DEFAULTS, TRAINER_ROWS, finish_trainer

_FULL = "training in part of the layers"
_ROWS: Mapping[str, Row] = {
    **TRAINER_ROWS,
    "model_name_or_path": text(Setting.MODEL),
    "cutoff_len": count(Setting.SEQ),
    "flash_attn": Row(
        read=lambda value: (
            Ignored(reason=Reason.UNSET) if value == "auto" else ATTENTION.read("disabled" if is_off(value) else value)
        )
    ),
    "packing": turned_on({Setting.PACKING: Packing.PLAIN}),
    "neat_packing": turned_on({Setting.PACKING: Packing.MASK}),
    # checkpointing.py, prepare_model_for_training: only the key below turns it off
    "gradient_checkpointing": turned_on({Setting.CHECKPOINTING: True}),
    "disable_gradient_checkpointing": switch(Setting.CHECKPOINTING, invert=True),
    "use_reentrant_gc": switch(Setting.REENTRANT),
    "galore_rank": count(Setting.GALORE_RANK),
    "lora_dropout": LORA_DROPOUT,
    "additional_target": modules(Setting.MODULES_TO_SAVE),
    "use_dora": switch(Setting.DORA),
    "double_quantization": switch(Setting.NESTED_QUANT),
    "use_galore": turned_on({Setting.OPTIMIZER: "galore"}),
    "use_muon": turned_on({Setting.OPTIMIZER: "muon"}),
    "use_adam_mini": turned_on({Setting.OPTIMIZER: "adam-mini"}),
    "use_apollo": turned_on({Setting.OPTIMIZER: "apollo"}),
    "use_badam": turned_on({Setting.OPTIMIZER: "badam"}),
    **part_of("adapter", "finetuning_type lora_rank lora_target quantization_bit quantization_method"),
    **part_of("method", "stage"),
    # hparams/training_args.py: one process per worker
    "ray_num_workers": count(Setting.GPUS),
    **part_of("precision", "pure_bf16"),
    **part_of("liger-kernel", "enable_liger_kernel"),
    # what recipes cannot express
    **lacking("an optimizer that steps layer by layer", "galore_layerwise apollo_layerwise"),
    **lacking("Unsloth", "use_unsloth use_unsloth_gc"),
    **lacking("LLaMA Pro's added blocks", "use_llama_pro", remedy=OTHER_TRAINING),
    **lacking("mixture of depths", "mixture_of_depths", remedy=OTHER_TRAINING),
    **lacking("shifted sparse attention", "shift_attn"),
    **lacking("norms in fp32", "upcast_layernorm"),
    **lacking("logits in fp32", "upcast_lmhead_output"),
    **lacking("another loss", "use_dft_loss use_asft_loss use_eaft_loss", remedy=OTHER_TRAINING),
    # version 1's kernels/interface.py: those chosen automatically are for NPUs
    **ignored(Reason.OTHER_METHOD, "use_v1_kernels"),
    **lacking("KTransformers, which trains experts on the CPU", "use_kt"),
    **lacking("Megatron", "use_mca use_megatron_bridge use_hyper_parallel"),
    **lacking("Megatron", "tensor_model_parallel_size expert_model_parallel_size pipeline_model_parallel_size"),
    **lacking("Megatron", "use_distributed_optimizer sequence_parallel recompute_granularity"),
    **lacking("context parallelism", "context_parallel_size", harmless=(1,)),
    **lacking("fp8 training", "fp8"),
    **lacking("a changed configuration of the model", "rope_scaling"),
    **lacking("a merge of an adapter, which is not training", "export_dir", remedy=NO_TRAINING),
    **lacking("a prediction run, which is not training", "do_predict predict_with_generate", remedy=NO_TRAINING),
    **lacking("block-diagonal masks", "block_diag_attn"),
    **lacking("images in the batches", "visual_inputs", remedy=OTHER_METHOD),
    **lacking("an evaluation run, which is not training", "task", remedy=NO_TRAINING),
    **left_out("added or resized embeddings", "resize_vocab add_tokens add_special_tokens new_special_tokens_config"),
    **left_out(METRICS, "compute_accuracy"),
    **ignored(Reason.EVALUATION, "val_size eval_dataset"),
    **ignored(
        Reason.DATA,
        "dataset template dataset_dir media_dir train_on_prompt mask_history buffer_size mix_strategy interleave_probs"
        " preprocessing_batch_size preprocessing_num_workers max_samples ignore_pad_token_for_loss tool_format"
        " default_system enable_thinking preserve_thinking tokenized_path data_shared_file_system streaming"
        " use_fast_tokenizer split_special_tokens disable_shuffling image_max_pixels image_min_pixels"
        " image_do_pan_and_scan crop_to_patches video_max_pixels video_min_pixels video_fps video_maxlen"
        " use_audio_in_video audio_sampling_rate model_max_length",
    ),
    **ignored(
        Reason.NUMBER,
        "lora_alpha loraplus_lr_ratio loraplus_lr_embedding use_rslora galore_scale galore_update_interval"
        " galore_proj_type moe_aux_loss_coef init_special_tokens quantization_type",
    ),
    **ignored(
        Reason.LOADING,
        "adapter_name_or_path adapter_folder cache_dir model_revision low_cpu_mem_usage trust_remote_code hf_hub_token"
        " ms_hub_token om_hub_token create_new_adapter export_hf_on_finish train_from_scratch"
        " pissa_init pissa_iter pissa_convert quantization_device_map device_map offload_folder"
        " infer_dtype compute_dtype",
    ),
    **ignored(
        Reason.OUTPUT,
        "plot_loss include_effective_tokens_per_second print_param_status use_swanlab swanlab_project swanlab_workspace"
        " swanlab_run_name swanlab_mode swanlab_api_key swanlab_logdir swanlab_lark_webhook_url swanlab_lark_secret"
        " enable_torch_profiler profiler_output_dir profiler_wait_steps profiler_warmup_steps profiler_active_steps"
        " profiler_repeat profiler_record_shapes profiler_profile_memory profiler_with_stack profile_modules",
    ),
    **ignored(
        Reason.EVALUATION,
        "eval_num_beams eval_on_each_dataset early_stopping_steps lang n_shot save_dir batch_size task_dir"
        " download_mode split",
    ),
    **ignored(
        Reason.GENERATION,
        "infer_backend use_kv_cache do_sample temperature top_p top_k num_beams max_length max_new_tokens"
        " repetition_penalty length_penalty skip_special_tokens vllm_maxlen vllm_gpu_util vllm_enforce_eager"
        " vllm_max_lora_rank vllm_config sglang_maxlen sglang_mem_fraction sglang_tp_size sglang_config"
        " sglang_lora_backend export_size export_device export_quantization_bit export_quantization_dataset"
        " export_quantization_nsamples export_quantization_maxlen export_legacy_format export_hub_model_id",
    ),
    **ignored(
        Reason.LAUNCH,
        "ray_init_kwargs master_addr master_port ray_run_name ray_storage_path resources_per_worker placement_strategy",
    ),
    **ignored(
        Reason.OTHER_METHOD,
        "galore_target apollo_rank apollo_target apollo_update_interval apollo_scale apollo_proj apollo_proj_type"
        " apollo_scale_type apollo_scale_front badam_mode badam_start_block badam_switch_mode badam_switch_interval"
        " badam_update_ratio badam_mask_mode badam_verbose freeze_trainable_layers freeze_trainable_modules"
        " freeze_extra_modules freeze_vision_tower freeze_multi_modal_projector freeze_language_model module_dropout"
        " oft_rank oft_block_size oft_target pref_beta pref_ftx pref_bco_weight pref_loss dpo_label_smoothing"
        " kto_chosen_weight kto_rejected_weight simpo_gamma dpo_ftx kto_ftx orpo_beta ppo_buffer_size"
        " ppo_epochs ppo_score_norm ppo_target"
        " ppo_whiten_rewards ref_model ref_model_adapters ref_model_quantization_bit reward_model"
        " reward_model_adapters reward_model_quantization_bit reward_model_type ld_alpha asft_alpha eaft_alpha"
        " fp8_backend fp8_enable_fsdp_float8_all_gather kt_config kt_cpu_activation kt_weight_path"
        " kt_optimize_rule cpu_infer chunk_size kt_non_expert_weight_path kt_expert_checkpoint_path"
        " kt_use_lora_experts kt_lora_expert_num"
        " kt_lora_expert_intermediate_size megatron_bridge_args hyper_parallel_args hyper_parallel_cp_size"
        " apply_rope_fusion bias_activation_fusion moe_grouped_gemm moe_token_dispatcher_type overlap_grad_reduce"
        " overlap_param_gather mixed_precision use_packed_sequences",
    ),
}


def _finish(reading: Reading, values: Mapping[str, Any]) -> None:
    """Read what depends on several keys: the method, the adapter, precision and liger-kernel."""
    finish_trainer(reading, values)
    stage, kind = values.get("stage", "sft"), values.get("finetuning_type", "lora")
    if "infer_backend" in values and is_off(values.get("do_train")):
        reading.lack("infer_backend", Lacking(what="a run without training", remedy=NO_TRAINING))
    if stage not in ("sft", "pt"):
        reading.lack("stage", Lacking(what=f"the stage {stage}", remedy=OTHER_METHOD), stage)
    if kind not in ("lora", "full"):
        reading.lack("finetuning_type", Lacking(what=f"{kind} tuning", remedy=OTHER_TRAINING), kind)
    if not is_off(values.get("gradient_checkpointing")):
        # the Trainer's own switch, whatever the other one says
        reading.set("gradient_checkpointing", {Setting.CHECKPOINTING: True})
    elif values.get("gradient_checkpointing") is not None and reading.value(Setting.CHECKPOINTING):
        reading.assumed.append(
            "checkpointing is on: LLaMA-Factory turns it off by disable_gradient_checkpointing alone"
        )
    _set_adapter(reading, values, kind)
    _set_precision(reading, values, kind)
    if not is_off(values.get("enable_liger_kernel")):
        reading.set("enable_liger_kernel", {Setting.LIGER: LIGER_DEFAULTS, Setting.PROVIDER: "liger"})
    if stage == "pt" and "packing" not in values:
        reading.defaults[Setting.PACKING] = Packing.PLAIN


def _set_adapter(reading: Reading, values: Mapping[str, Any], kind: Any) -> None:
    bits = values.get("quantization_bit")
    if not is_off(bits) and str(values.get("quantization_method", "bnb")).lower() not in ("bnb", "bitsandbytes"):
        reading.lack("quantization_method", Lacking(what="quantization other than bitsandbytes'"))
    if kind != "lora":
        without_adapter(reading)
        return
    rank = whole_number_at(reading, "lora_rank", values.get("lora_rank") or 8)
    reading.set("lora_rank" if "lora_rank" in values else "finetuning_type", {Setting.RANK: rank})
    if not is_off(bits):
        reading.set("quantization_bit", {Setting.BITS: whole_number_at(reading, "quantization_bit", bits)})
    # adapter.py: resized embeddings are trained, and what is trained is cast to fp32
    if not is_off(values.get("resize_vocab")) and is_off(values.get("additional_target")):
        reading.set("resize_vocab", {Setting.MODULES_TO_SAVE: EMBEDDING_AND_HEAD})
    reading.defaults[Setting.FP32_SAVED_MODULES] = is_off(values.get("pure_bf16"))
    targets = values.get("lora_target", "all")
    named = "all-linear" if targets == "all" else modules_at(reading, "lora_target", targets)
    reading.set("lora_target", {Setting.LORA_TARGETS: named})


def _set_precision(reading: Reading, values: Mapping[str, Any], kind: Any) -> None:
    """The model is loaded in the dtype of the computation; what is trained is cast up to fp32 (model/adapter.py)."""
    autocast = reading.value(Setting.AUTOCAST) or "no"
    pure = not is_off(values.get("pure_bf16"))
    if pure:
        reading.set("pure_bf16", {Setting.WEIGHTS: "bfloat16", Setting.AUTOCAST: "no"})
    elif autocast == "no":
        reading.defaults[Setting.WEIGHTS] = "checkpoint"
    else:
        loaded = {"bf16": "bfloat16", "fp16": "float16"}[autocast]
        key = "bf16" if autocast == "bf16" else "fp16"
        weights = "float32" if kind == "full" else loaded
        reading.set(key, {Setting.WEIGHTS: weights, Setting.AUTOCAST: autocast})


LLAMA_FACTORY = Framework(
    name="llama-factory",
    title="a configuration of LLaMA-Factory",
    rows=_ROWS,
    signature=frozenset(
        {"stage", "finetuning_type", "cutoff_len", "template", "lora_target", "lora_rank", "dataset_dir"}
    ),
    defaults={
        **TRAINER_DEFAULTS,
        Setting.SEQ: 2048,
        Setting.CHECKPOINTING: True,
        Setting.REENTRANT: True,
    },
    finish=_finish,
)

_DISTRIBUTED = {
    "name": words(
        Setting.ENGINE, {"fsdp2": "fsdp2", "deepspeed": "deepspeed", "ddp": "ddp", "none": "torch"}, what="engine"
    ),
    **part_of("the engine", "config_file"),
    **ignored(Reason.SAVING, "dcp_path"),
    **ignored(Reason.OTHER_METHOD, "ep_dispatcher cp_mode"),
    **lacking("expert parallelism", "ep_size", harmless=(1,)),
    **lacking("tensor parallelism", "tp_size", harmless=(1,)),
    **lacking("context parallelism", "cp_size", harmless=(1,)),
}
_VERSION_1: Mapping[str, Row] = {
    "model": text(Setting.MODEL),
    "micro_batch_size": count(Setting.BATCH),
    "gradient_accumulation_steps": count(Setting.GRAD_ACCUM, auto=True),
    "cutoff_len": count(Setting.SEQ),
    "max_grad_norm": number(Setting.CLIP),
    **part_of("the dtype that FSDP gathers", "bf16"),
    "flash_attn": _ROWS["flash_attn"],
    "enable_activation_checkpointing": switch(Setting.CHECKPOINTING),
    "optim": OPTIMIZER,
    "dist_config": section(_DISTRIBUTED),
    "batching_strategy": words(
        Setting.PACKING,
        {
            "normal": Ignored(reason=Reason.UNSET),
            "padding_free": Packing.PADDING_FREE,
            "dynamic_padding_free": Packing.PADDING_FREE,
        },
        what="batching",
    ),
    **lacking("context parallelism", "cp_size", harmless=(1,)),
    **part_of("context parallelism", "cp_mode"),
    "global_batch_size": count(Setting.TRAIN_BATCH),
    # kernels/interface.py: `auto` chooses kernels on NPUs only
    "kernel_config": section(
        {
            **lacking("kernels of version 1", "name", harmless=("auto",)),
            **ignored(Reason.OTHER_METHOD, "include_kernels use_kernels require_logits chunk_size"),
        }
    ),
    **lacking("an optimizer of version 1", "optim_config"),
    **lacking("an adapter of version 1", "peft_config"),
    **lacking("a quantization of version 1", "quant_config"),
    **ignored(
        Reason.DATA, "train_dataset eval_dataset template batching_workers num_workers use_packed_sequences model_class"
    ),
    **ignored(Reason.LOADING, "init_config trust_remote_code"),
    **ignored(Reason.SCHEDULE, "learning_rate lr_scheduler_config max_steps num_train_epochs"),
    **ignored(Reason.NUMBER, "weight_decay"),
    **ignored(Reason.OUTPUT, "output_dir logging_steps report_to run_name"),
    **ignored(Reason.SAVING, "save_steps save_total_limit resume_from_checkpoint"),
    **ignored(Reason.GENERATION, "sample_backend max_new_tokens"),
    **ignored(Reason.RANDOM, "seed"),
}

LLAMA_FACTORY_1 = Framework(
    name="llama-factory-1",
    title="a configuration of LLaMA-Factory 1",
    rows=_VERSION_1,
    signature=frozenset(
        {"model_class", "train_dataset", "dist_config", "kernel_config", "init_config", "sample_backend"}
    ),
    defaults={
        Setting.BATCH: 1,
        Setting.SEQ: 2048,
        Setting.GRAD_ACCUM: 1,
        Setting.CLIP: 1.0,
        Setting.CHECKPOINTING: True,
        Setting.REENTRANT: False,
        Setting.WEIGHTS: "checkpoint",
        Setting.AUTOCAST: "no",
        Setting.OPTIMIZER: "adamw-foreach",
        # core/base_trainer.py passes labels to the model, and computes another loss from fp32 logits that are shifted
        Setting.LOSS: Lacking(what="the second loss of LLaMA-Factory 1", setting=Setting.LOSS),
    },
)
