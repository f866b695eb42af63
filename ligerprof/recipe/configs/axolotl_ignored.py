"""Keys of axolotl without effect on the memory of a training step, by reason."""

from collections.abc import Mapping

from ligerprof.recipe.configs.rows import Row, ignored
from ligerprof.recipe.configs.settings import Reason

IGNORED_ROWS: Mapping[str, Row] = {
    **ignored(
        Reason.DATA,
        "datasets pretraining_dataset shuffle_merged_datasets shuffle_before_merging_datasets dataset_prepared_path"
        " dataset_shard_num dataset_shard_idx skip_prepare_dataset num_dataset_shards_to_save dataset_processes"
        " dataset_num_proc dataset_exact_deduplication dataset_keep_in_memory dataloader_pin_memory"
        " dataloader_num_workers dataloader_prefetch_factor dataloader_drop_last remove_unused_columns"
        " push_dataset_to_hub hf_use_auth_token train_on_inputs group_by_length pad_to_sequence_len pad_to_multiple_of"
        " sample_packing_group_size sample_packing_bin_size sample_packing_sequentially sample_packing_mp_start_method"
        " sample_packing_eff_est sample_packing_seq_len_multiplier curriculum_sampling multipack_real_batches"
        " excess_length_strategy min_sample_len max_prompt_len use_pose pose_split_on_token_ids pose_max_context_len"
        " pose_num_chunks pretrain_multipack_buffer_size pretrain_multipack_attn pretraining_sample_concatenation"
        " streaming streaming_multipack_buffer_size chat_template chat_template_jinja"
        " chat_template_kwargs eot_tokens default_system_message special_tokens is_preprocess preprocess_iterable"
        " total_num_tokens total_supervised_tokens tokenizer_config tokenizer_use_fast tokenizer_legacy tokenizer_type"
        " tokenizer_use_mistral_common tokenizer_save_jinja_files processor_kwargs image_resize_algorithm"
        " role_boundaries max_packed_sequence_len fix_untrained_tokens collator_pad_to_longest",
    ),
    **ignored(
        Reason.SCHEDULE,
        "num_epochs max_steps warmup_steps warmup_ratio learning_rate embedding_lr embedding_lr_scale lr_scheduler"
        " lr_scheduler_kwargs lr_quadratic_warmup cosine_min_lr_ratio cosine_constant_lr_ratio lr_div_factor lr_groups"
        " jagged_restart_steps jagged_restart_warmup_steps jagged_restart_anneal_steps eta_min dion_lr"
        " loraplus_lr_ratio loraplus_lr_embedding early_stopping_patience loss_watchdog_threshold"
        " loss_watchdog_patience",
    ),
    **ignored(
        Reason.NUMBER,
        "weight_decay adam_beta1 adam_beta2 adam_beta3 adam_epsilon adam_epsilon2 adam_eps optim_args lora_alpha"
        " lora_alpha_pattern peft_use_rslora peft_init_lora_weights lora_fan_in_fan_out scaling_softmax_factor"
        " scaling_softmax_bias accelerator_config peft_ensure_weight_tying",
    ),
    **ignored(
        Reason.LOADING,
        "base_model_config base_model_ignore_patterns model_type type_of_model revision_of_model trust_remote_code"
        " is_falcon_derived_model is_llama_derived_model is_mistral_derived_model is_qwen_derived_model"
        " low_cpu_mem_usage lora_model_dir lora_out_dir device_map experimental_skip_move_to_device"
        " reinit_weights cls_model_config"
        " qlora_sharded_model_loading mean_resizing_embeddings shrink_embeddings embeddings_skip_upcast device"
        " torch_dtype freeze_mm_modules",
    ),
    **ignored(
        Reason.OUTPUT,
        "output_dir hub_model_id hub_strategy hub_revision logging_steps use_tensorboard use_wandb wandb_name"
        " wandb_run_id wandb_mode wandb_project wandb_entity wandb_watch wandb_log_model use_mlflow mlflow_tracking_uri"
        " mlflow_experiment_name mlflow_run_name hf_mlflow_log_artifacts use_comet comet_api_key comet_workspace"
        " comet_project_name comet_experiment_key comet_mode comet_online comet_experiment_config use_otel_metrics"
        " otel_metrics_host otel_metrics_port use_trackio trackio_project_name trackio_run_name trackio_space_id"
        " use_swanlab swanlab_project swanlab_experiment_name swanlab_description swanlab_mode swanlab_workspace"
        " swanlab_api_key swanlab_log_model swanlab_web_host swanlab_api_host swanlab_lark_webhook_url"
        " swanlab_lark_secret swanlab_log_completions swanlab_completion_log_interval swanlab_completion_max_buffer"
        " include_tokens_per_second include_tkps profiler_steps profiler_steps_start gradio_title gradio_share"
        " gradio_server_name gradio_server_port gradio_max_new_tokens gradio_temperature axolotl_config_path",
    ),
    **ignored(
        Reason.SAVING,
        "save_steps saves_per_epoch save_strategy save_total_limit save_first_step save_only_model save_safetensors"
        " save_compressed resume_from_checkpoint auto_resume_from_checkpoints dynamic_checkpoint merge_lora"
        " merge_method nvfp4_merge_aware nvfp4_merge_aware_start_step quantization",
    ),
    **ignored(
        Reason.EVALUATION,
        "eval_steps evals_per_epoch eval_sample_packing eval_sequence_len eval_table_size"
        " eval_max_new_tokens eval_table_max_new_tokens eval_causal_lm_metrics bench_dataset bench_split"
        " metric_for_best_model greater_is_better"
        " load_best_model_at_end lm_eval_tasks lm_eval_batch_size lm_eval_post_train lm_eval_model",
    ),
    **ignored(
        Reason.GENERATION,
        "num_generation_samples generation_max_new_tokens generation_temperature generation_top_p generation_top_k"
        " generation_prompt_ratio generation_do_sample vllm",
    ),
    **ignored(
        Reason.LAUNCH,
        "ddp ddp_timeout ddp_broadcast_buffers world_size local_rank use_ray ray_run_name ray_num_workers"
        " resources_per_worker trainer_cls",
    ),
    **ignored(Reason.RANDOM, "seed data_seed"),
    **ignored(Reason.SPEED, "tf32 gc_steps gc_collect_steps torch_empty_cache_steps gpu_memory_limit"),
    **ignored(Reason.CHECKS, "strict debug"),
    # numbers of methods that another key switches on, which is refused
    **ignored(
        Reason.OTHER_METHOD,
        "trl ebft rl_beta dpo_beta orpo_alpha simpo_gamma cpo_alpha rpo_alpha kto_desirable_weight"
        " kto_undesirable_weight dpo_use_weighting dpo_label_smoothing precompute_ref_log_probs dpo_use_liger_kernel"
        " dpo_padding_free dpo_loss_type dpo_loss_weights dpo_use_logits_to_keep dpo_generate_during_eval dpo_norm_loss"
        " eaft_alpha eaft_k chunked_cross_entropy_num_chunks tiled_mlp_num_shards tiled_mlp_use_original_mlp"
        " flex_attn_compile_kwargs fp8_enable_fsdp_float8_all_gather fp32_norm_classes heads_k_stride ring_attn_func"
        " torch_compile_backend torch_compile_mode torch_compile_options torchdistx_path grokfast_lamb"
        " gptq_groupsize gptq_model_v1 gptq_disable_exllama model_quantization_config_kwargs optim_target_modules"
        " lisa_step_interval lisa_layers_attribute relora_steps relora_warmup_steps relora_prune_ratio"
        " relora_prune_method relora_cpu_offload"
        " expert_parallel_backend expert_parallel_num_nvl_bytes expert_parallel_num_rdma_bytes"
        " expert_parallel_token_capacity expert_parallel_fallback_on_unsupported dense_mixer hatchery"
        " kd_ce_alpha kd_alpha kd_temperature kd_beta kd_normalize_topk kd_online_server_base_url kd_online_topk"
        " kd_online_server kd_online_timeout kd_temperature_min spectrum_top_fraction spectrum_model_name recipe"
        " dion_momentum dion_rank_fraction dion_rank_multiple_of qgalore_rank qgalore_update_proj_gap qgalore_scale"
        " qgalore_proj_type qgalore_proj_quant qgalore_proj_bits qgalore_proj_group_size qgalore_cos_threshold"
        " qgalore_gamma_proj qgalore_queue_size nonexpert_quantization moe_grouped_backend moe_dequant_chunk_size"
        " moe_bnb_fast dsv4_fp8_nonexpert_mode dsv4_fp8_lora_kernel dsv4_shared_mlp_lora_kernel dsv4_bf16_all"
        " dsv4_fp4_grouped_mode gemma4_fp8_nonexpert gemma4_nf4_nonexpert nemo_gym_enabled nemo_gym_dir"
        " nemo_gym_auto_clone nemo_gym_config_paths nemo_gym_head_port nemo_gym_server_timeout nemo_gym_verify_timeout"
        " nemo_gym_run_timeout nemo_gym_datasets nemo_gym_auto_start nemo_gym_model_name nemo_gym_multi_turn"
        " nemo_gym_max_turns",
    ),
}
