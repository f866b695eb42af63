"""TRL's configurations: SFT, and those of preference, reward and reinforcement methods, which recipes do not cover."""

from collections.abc import Mapping
from typing import Any

from ligerprof.recipe.configs.framework import Framework
from ligerprof.recipe.configs.refusals import OTHER_METHOD, OTHER_TRAINING
from ligerprof.recipe.configs.rows import (
    Row,
    count,
    file_name,
    ignored,
    is_off,
    lacking,
    part_of,
    section,
    switch,
    text,
    truth,
    turned_on,
    words,
)
from ligerprof.recipe.configs.settings import PEFT_DEFAULT, Lacking, Outcome, Packing, Reading, Reason, Setting
from ligerprof.recipe.configs.shared import (
    ATTENTION,
    DTYPE,
    LORA_DROPOUT,
    modules,
    modules_at,
    quantization_rows,
    whole_number_at,
    without_adapter,
)
from ligerprof.recipe.configs.trainer import FAMILY, TRAINER_DEFAULTS, TRAINER_ROWS, TRAINER_SIGNATURE, finish_trainer

_NO_LENGTH = Lacking(what="a sequence length of null", setting=Setting.SEQ)
_LENGTH = Row(read=count(Setting.SEQ).read, null=_NO_LENGTH)


def _read_accelerate_config(value: Any) -> Outcome:
    return file_name("accelerate")(value)


_INIT_KWARGS = {
    "dtype": DTYPE,
    "torch_dtype": DTYPE,
    "attn_implementation": ATTENTION,
    **lacking("another configuration of the model", "config rope_scaling"),
    **lacking("a quantization configuration", "quantization_config"),
    **lacking("a model split over several GPUs", "device_map max_memory", harmless=("auto",)),
    **ignored(Reason.LOADING, "trust_remote_code revision low_cpu_mem_usage cache_dir token use_safetensors"),
    **ignored(Reason.GENERATION, "use_cache"),
}
_COMMON: Mapping[str, Row] = {
    **TRAINER_ROWS,
    "max_length": _LENGTH,
    "max_seq_length": _LENGTH,
    "model_init_kwargs": section(_INIT_KWARGS),
    "activation_offloading": switch(Setting.ACTIVATION_OFFLOAD),
    # TRL 1.16 pads on Neuron only
    "pad_to_multiple_of": count(Setting.PAD_TO_MULTIPLE_OF, auto=True),
    "accelerate_config": Row(read=_read_accelerate_config),
    # the model's arguments
    "model_name_or_path": text(Setting.MODEL),
    "dtype": DTYPE,
    "torch_dtype": DTYPE,
    "attn_implementation": ATTENTION,
    **part_of("adapter", "use_peft lora_r lora_target_modules"),
    "lora_dropout": LORA_DROPOUT,
    "lora_modules_to_save": modules(Setting.MODULES_TO_SAVE),
    "use_dora": switch(Setting.DORA),
    **quantization_rows(),
    "use_bnb_nested_quant": switch(Setting.NESTED_QUANT),
    **ignored(Reason.NUMBER, "lora_alpha use_rslora router_aux_loss_coef"),
    **ignored(Reason.LOADING, "trust_remote_code model_revision lora_task_type"),
    **lacking("LoRA on parameters of experts", "lora_target_parameters"),
    # the script's arguments
    **ignored(
        Reason.DATA,
        "dataset_name dataset_config dataset_train_split dataset_test_split dataset_streaming datasets streaming"
        " test_split_size dataset_num_proc dataset_batch_size dataset_text_field dataset_kwargs shuffle_dataset"
        " eos_token pad_token chat_template_path truncation_mode",
    ),
    # scripts on top of TRL: alignment-handbook, open-r1, philschmid's
    "model_id": text(Setting.MODEL),
    "max_seq_len": _LENGTH,
    **lacking("training of chosen parameters", "spectrum_config_path", remedy=OTHER_TRAINING),
    **ignored(Reason.DATA, "dataset_id_or_path dataset_path dataset_split train_dataset_path test_dataset_path"),
    **ignored(
        Reason.DATA,
        "dataset_mixer dataset_mixture dataset_splits dataset_configs dataset_columns dataset_prompt_column"
        " preprocessing_num_workers chat_template auto_insert_empty_system_msg truncation_side system_prompt",
    ),
    **ignored(Reason.LOADING, "tokenizer_name_or_path model_code_revision base_model_revision"),
    **ignored(
        Reason.OUTPUT,
        "callbacks benchmarks wandb_run_id wandb_tags merge_adapter hub_model_revision overwrite_hub_revision"
        " push_to_hub_revision num_completions_to_print wandb_entity wandb_project wandb_run_group"
        " wandb_log_unique_prompts",
    ),
    "use_flash_attention_2": turned_on({Setting.ATTENTION: "flash"}),
    "gradient_checkpointing_use_reentrant": switch(Setting.REENTRANT),
    # an argument of `accelerate launch`, which TRL's command line takes from the file
    "num_processes": count(Setting.GPUS),
    **ignored(Reason.LAUNCH, "env num_machines machine_rank main_process_ip main_process_port"),
    **ignored(Reason.CHECKS, "ignore_bias_buffers"),
}
_SFT: Mapping[str, Row] = {
    **_COMMON,
    "packing": turned_on({Setting.PACKING: Packing.DOCUMENTS}),
    "padding_free": turned_on({Setting.PACKING: Packing.PADDING_FREE}),
    **part_of("packing", "packing_strategy"),
    "loss_type": words(
        Setting.LOSS,
        # a product with the probability, per token, makes dft's loss
        dict.fromkeys(("nll", "chunked_nll", "dft"), "trl-tiled"),
        what="loss",
        remedy="Choose another with --loss.",
    ),
    **ignored(Reason.DATA, "completion_only_loss assistant_only_loss formatting_func"),
    **ignored(Reason.EVALUATION, "eval_packing"),
    # of older versions
    **ignored(Reason.DATA, "num_of_sequences chars_per_token use_liger"),
    **part_of("liger-kernel", "use_liger"),
}
_DEFAULTS: Mapping[Setting, Any] = {
    **TRAINER_DEFAULTS,
    Setting.SEQ: 1024,
    Setting.CHECKPOINTING: True,
    Setting.AUTOCAST: "bf16",
    # trl/trainer/model_config.py
    Setting.LORA_DROPOUT: 0.05,
    # trl/trainer/utils.py, create_model_from_path, with every version of transformers
    Setting.WEIGHTS: "float32",
}


def _finish_common(reading: Reading, values: Mapping[str, Any]) -> None:
    finish_trainer(reading, values)
    if is_off(values.get("bf16", True)) or not is_off(values.get("fp16")):
        reading.defaults[Setting.AUTOCAST] = "no"
    if is_off(values.get("use_peft")):
        without_adapter(reading)
        return
    rank = whole_number_at(reading, "lora_r", values.get("lora_r") or 16)
    reading.set("lora_r" if "lora_r" in values else "use_peft", {Setting.RANK: rank})
    if reading.value(Setting.BITS) is not None:
        # TRL 0.26 and later cast adapters over 4-bit weights to bf16 (sft_trainer.py), earlier versions under bf16
        reading.defaults[Setting.ADAPTER_DTYPE] = "bfloat16"
        reading.defaults[Setting.NESTED_QUANT] = False
    targets = values.get("lora_target_modules")
    named = (
        targets
        if isinstance(targets, str)
        else modules_at(reading, "lora_target_modules", targets)
        if targets
        else PEFT_DEFAULT
    )
    # peft reads a list of one name as the name
    single = named[0] if isinstance(named, list) and named == ["all-linear"] else named
    reading.set("lora_target_modules" if targets else "use_peft", {Setting.LORA_TARGETS: single})


def _finish_sft(reading: Reading, values: Mapping[str, Any]) -> None:
    """Read what depends on several keys: precision, adapter, packing and the loss."""
    _finish_common(reading, values)
    if not is_off(values.get("packing")):
        # only bfd, the default, turns padding_free on; wrapped rows are cut from one stream of tokens
        wrapped = Packing.PLAIN if is_off(values.get("padding_free")) else Packing.PADDING_FREE
        is_wrapped = values.get("packing_strategy") == "wrapped"
        reading.set("packing", {Setting.PACKING: wrapped if is_wrapped else Packing.DOCUMENTS})
    _set_loss(reading, values)


def _set_loss(reading: Reading, values: Mapping[str, Any]) -> None:
    """TRL 1.15 and later compute every loss in tiles, and liger-kernel replaces layers only (sft_trainer.py).

    They refuse liger-kernel's fused loss, so that a file that asks for it by name is for an earlier version.
    """
    details = values.get("liger_kernel_config")
    asks_for_fused = isinstance(details, Mapping) and truth(details.get("fused_linear_cross_entropy") or False)
    switch_key = next((key for key in ("use_liger_kernel", "use_liger") if not is_off(values.get(key))), None)
    if switch_key is not None and asks_for_fused:
        reading.set(switch_key, {Setting.LOSS: "hf"})
        return
    reading.defaults[Setting.LOSS] = "trl-tiled"
    if switch_key is not None:
        kernels = reading.value(Setting.LIGER)
        reading.set(switch_key, {Setting.LIGER: kernels - {"flce", "ce"}, Setting.PROVIDER: "liger"})
    if reading.value(Setting.LOSS) == "trl-tiled":
        before = (
            "--liger all --provider liger --loss hf"
            if switch_key is not None
            else "--loss chunked-nll, or --loss hf for nll"
        )
        reading.assumed.append(f"the loss of TRL 1.15 and later, in tiles; for TRL 1.14 and before: {before}")


TRL_SFT = Framework(
    name="trl-sft",
    title="TRL's SFTConfig",
    family=FAMILY,
    rows=_SFT,
    signature=TRAINER_SIGNATURE
    | {"dataset_name", "dataset_text_field", "max_length", "packing", "use_peft", "completion_only_loss"},
    defaults=_DEFAULTS,
    finish=_finish_sft,
)


def _other(name: str, title: str, method: str, own: str) -> Framework:
    """A configuration of a method that recipes do not cover; its keys are still known, and read."""
    keys = own.split()

    def finish(reading: Reading, values: Mapping[str, Any]) -> None:
        _finish_common(reading, values)
        key = next((key for key in keys if key in values), name)
        reading.lack(key, Lacking(what=method, remedy=OTHER_METHOD))

    return Framework(
        name=name,
        title=title,
        family=FAMILY,
        rows={**_COMMON, **part_of(method, own)},
        signature=TRAINER_SIGNATURE | set(keys),
        defaults=_DEFAULTS,
        finish=finish,
    )


TRL_DPO = _other(
    "trl-dpo",
    "TRL's DPOConfig",
    "DPO or another preference method, with pairs of sequences",
    "beta precompute_ref_log_probs precompute_ref_batch_size loss_weights ld_alpha f_divergence_type"
    " f_alpha_divergence_coef label_smoothing use_weighting discopop_tau sync_ref_model ref_model_mixup_alpha"
    " ref_model_sync_steps max_prompt_length max_completion_length disable_dropout reference_free rpo_alpha"
    " use_logits_to_keep ref_model_init_kwargs generate_during_eval model_adapter_name ref_adapter_name"
    " force_use_ref_model padding_value label_pad_token_id is_encoder_decoder base_model_attribute_name tools"
    " ref_adapter ref_model padding_free loss_type"
    # CPO and SimPO
    " simpo_gamma gamma_beta_ratio cpo_alpha",
)
TRL_REWARD = _other(
    "trl-reward",
    "TRL's RewardConfig",
    "reward modeling, with a classification head",
    "center_rewards_coefficient disable_dropout",
)
_RL_KEYS = (
    "num_generations max_prompt_length max_completion_length temperature top_p top_k min_p repetition_penalty"
    " use_vllm vllm_mode vllm_server_host vllm_server_port vllm_server_timeout vllm_gpu_memory_utilization"
    " vllm_tensor_parallel_size vllm_enable_sleep_mode vllm_max_model_length vllm_model_impl vllm_server_base_url"
    " vllm_guided_decoding_regex vllm_structured_outputs_regex vllm_importance_sampling_correction"
    " vllm_importance_sampling_cap vllm_importance_sampling_mode vllm_group_port vllm_enable_prefix_caching"
    " beta num_iterations epsilon epsilon_high delta importance_sampling_level reward_weights reward_funcs"
    " scale_rewards loss_type mask_truncated_completions sync_ref_model ref_model_mixup_alpha ref_model_sync_steps"
    " use_liger_loss generation_batch_size steps_per_generation generation_kwargs cache_implementation"
    " use_transformers_paged"
    " ds3_gather_for_generation disable_dropout log_completions num_completions_to_print log_unique_prompts"
    " top_entropy_quantile chat_template_kwargs shuffle_dataset normalize_advantages reward_clip_range rloo_k"
    " desirable_weight undesirable_weight precompute_ref_log_probs reward_model_path judge missing_eos_penalty"
    " use_bias_correction_kl off_policy_mask_threshold multi_objective_aggregation log_multimodal"
    " max_tool_calling_iterations pad_to_multiple_of num_ppo_epochs num_mini_batches kl_coef cliprange vf_coef"
    " gamma lam teacher_model_name_or_path lmbda seq_kd"
    # TRL 0.14 to 0.16, and open-r1's rewards
    " vllm_device vllm_dtype vllm_max_model_len cosine_min_value_wrong cosine_max_value_wrong cosine_min_value_correct"
    " cosine_max_value_correct cosine_max_len repetition_n_grams repetition_max_penalty code_language"
    " code_eval_test_batch_size code_eval_scoring_mode parallel_code_exec_per_proc e2b_router_url morph_router_url"
    " code_provider ioi_provider max_completion_len soft_punish_cache"
)
TRL_RL = _other(
    "trl-rl",
    "TRL's configuration of a reinforcement method (GRPO, RLOO, KTO, …)",
    "reinforcement learning",
    _RL_KEYS,
)
# chosen by name alone: their files have the keys of others
TRL_BY_NAME = tuple(
    _other(f"trl-{method.lower()}", f"TRL's {method}Config", method, _RL_KEYS)
    for method in ("GRPO", "RLOO", "PPO", "KTO")
)
