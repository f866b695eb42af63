"""axolotl's YAML, of the schema of 2023 to 2026."""

from collections.abc import Mapping
from typing import Any

from ligerprof.recipe.configs import rows, shared
from ligerprof.recipe.configs.deepspeed import finish_deepspeed
from ligerprof.recipe.configs.settings import OTHER_METHOD, OTHER_TRAINING, Lacking, Packing, Reading, Sets, Setting
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.torch_memory.saved_tensors import ADDMM, BMM, FUSED_ATTENTION, MM

# grouped_mm is what transformers takes where nothing is set
(_OTHER_EXPERTS,) = rows.lacking("another implementation of experts", "key", harmless=("grouped_mm",)).values()
_LIGER = "axolotl.integrations.liger.LigerPlugin"
_CCE = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
# plug-ins without tensors of their own in a training step
_HARMLESS_PLUGINS = ("SwanLabPlugin", "LMEvalPlugin")
_LORA_KERNELS = "axolotl's fused LoRA kernels"
_LORA_KERNEL_KEYS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
# what axolotl's `save` matches
_SELECTIVE = {"attention": "+".join(FUSED_ATTENTION), "aten::mm": MM, "aten::addmm": ADDMM, "aten::bmm": BMM}


_IN_TURN = Sets(values={Setting.EXPERTS: "eager"})
# the old names of activation_offloading
_OFFLOAD = Sets(values={Setting.CHECKPOINTING: True, Setting.ACTIVATION_OFFLOAD: True})
_ON_DISK = Lacking(what="checkpoints on a disk", setting=Setting.CHECKPOINTING)
_ROWS: Mapping[str, rows.Row] = {
    **rows.ignored_keys("axolotl"),
    "base_model": rows.text(Setting.MODEL),
    "micro_batch_size": rows.count(Setting.BATCH),
    "gradient_accumulation_steps": rows.count(Setting.GRAD_ACCUM, auto=True),
    "sequence_len": rows.count(Setting.SEQ),
    "max_grad_norm": rows.number(Setting.CLIP),
    "optimizer": shared.OPTIMIZER,
    "gradient_checkpointing": rows.words(
        Setting.CHECKPOINTING,
        {"true": True, "false": False, **dict.fromkeys(("offload", "unsloth"), _OFFLOAD), "offload_disk": _ON_DISK},
        what="gradient_checkpointing",
    ),
    "gradient_checkpointing_kwargs": shared.CHECKPOINTING_KWARGS,
    "activation_offloading": rows.words(
        Setting.ACTIVATION_OFFLOAD, {"true": True, "false": False}, what="activation offloading"
    ),
    "sample_packing": rows.turned_on({Setting.PACKING: Packing.MASK}),
    "batch_flattening": rows.turned_on({Setting.PACKING: Packing.PADDING_FREE}),
    "attn_implementation": shared.ATTENTION,
    "flash_attention": rows.turned_on({Setting.ATTENTION: "flash"}),
    "sdp_attention": rows.turned_on({Setting.ATTENTION: "sdpa"}),
    "eager_attention": rows.turned_on({Setting.ATTENTION: "eager"}),
    "torch_compile": rows.turned_on({Setting.COMPILE: True}, auto=True),
    "deepspeed": shared.DEEPSPEED_SECTION,
    "fsdp": shared.FSDP_SWITCH,
    "fsdp_config": rows.section(shared.FSDP_ROWS),
    "fsdp_final_state_dict_type": shared.FSDP_ROWS["final_state_dict_type"],
    "accelerator_config": shared.ACCELERATOR_CONFIG,
    "dp_replicate_size": rows.count(Setting.REPLICATE),
    **rows.part_of("number of GPUs", "dp_shard_size"),
    **rows.part_of("part of FSDP", "fsdp_version"),
    **rows.part_of("accumulation", "batch_size"),
    **rows.part_of("precision", "bf16 bfloat16 fp16 float16 float32"),
    **rows.part_of("adapter", "adapter load_in_4bit load_in_8bit lora_r lora_target_linear lora_target_modules"),
    "lora_modules_to_save": shared.modules(Setting.MODULES_TO_SAVE),
    "peft_use_dora": rows.switch(Setting.DORA),
    "lora_dropout": shared.LORA_DROPOUT,
    **rows.part_of("plug-ins", "plugins"),
    **rows.part_of(
        "liger-kernel",
        "liger_rope liger_rms_norm liger_rms_norm_gated liger_layer_norm liger_swiglu liger_glu_activation"
        " liger_cross_entropy liger_fused_linear_cross_entropy",
    ),
    **rows.part_of("cut-cross-entropy", "cut_cross_entropy"),
    # what recipes cannot express
    **rows.lacking("flex attention", "flex_attention"),
    **rows.lacking("attention of xformers", "xformers_attention"),
    **rows.lacking(
        "another attention",
        "sage_attention s2_attention landmark_attention large_head_attention flash_attn_d512 sdpa_varlen",
    ),
    **rows.lacking("another attention", "gemma4_hybrid_attn_impl fused_attn_kernel scaling_softmax"),
    **rows.lacking(
        "fused operations of flash-attn",
        "flash_attn_cross_entropy flash_attn_fuse_mlp flash_attn_fuse_qkv flash_attn_rms_norm",
    ),
    **rows.lacking("optimum's BetterTransformer", "flash_optimum"),
    **rows.lacking(_LORA_KERNELS, " ".join(_LORA_KERNEL_KEYS)),
    **rows.lacking("kernels from the hub", "use_kernels"),
    **rows.lacking("kernels of experts", "use_scattermoe use_sonicmoe use_dsv4_kernels use_glm_dsa_kernels"),
    **rows.lacking("kernels of experts", "expert_backend", harmless=("eager",)),
    "experts_implementation": rows.Row(read=lambda value: _IN_TURN if value == "eager" else _OTHER_EXPERTS.read(value)),
    **rows.lacking("quantized experts", "quantize_moe_experts llama4_linearized_experts"),
    **rows.lacking("a chunked loss", "chunked_cross_entropy", setting=Setting.LOSS),
    **rows.lacking("another loss", "use_eaft kd_trainer diffusion liger_use_token_scaling", remedy=OTHER_TRAINING),
    **rows.lacking("tiled MLP layers", "tiled_mlp"),
    **rows.lacking("layers in host memory", "layer_offloading"),
    **rows.part_of("selective checkpointing", "selective_checkpointing"),
    **rows.lacking("training of chosen parameters", "unfrozen_parameters lisa_n_layers", remedy=OTHER_TRAINING),
    **rows.lacking("LoRA on parameters of experts", "lora_target_parameters"),
    **rows.lacking("layers chosen for LoRA", "peft_layers_to_transform peft_layers_pattern peft_layer_replication"),
    **rows.lacking("ranks per layer", "lora_rank_pattern"),
    **rows.lacking("trained tokens of the embedding", "peft_trainable_token_indices", remedy=OTHER_TRAINING),
    **rows.part_of("adapter", "peft_autocast_adapter_dtype"),
    **rows.lacking("ReLoRA", "relora", remedy=OTHER_TRAINING),
    **rows.lacking("MoRA", "mora"),
    **rows.lacking("adapters in main memory", "lora_on_cpu"),
    **rows.lacking("quantization-aware training", "qat use_onebitllms"),
    **rows.lacking(
        "quantized checkpoints (GPTQ, AWQ, MXFP4, …)", "gptq load_4bit model_quantization_config llmcompressor"
    ),
    "bnb_config_kwargs": rows.section(
        {
            "bnb_4bit_use_double_quant": rows.switch(Setting.NESTED_QUANT),
            **rows.lacking("another storage dtype of 4-bit weights", "bnb_4bit_quant_storage", harmless=("uint8",)),
            **rows.lacking("products in another dtype", "bnb_4bit_compute_dtype"),
            **rows.lacking("another configuration of 8-bit weights", "llm_int8_has_fp16_weight llm_int8_threshold"),
            **rows.lacking("another configuration of 8-bit weights", "llm_int8_skip_modules"),
        },
        ignored="axolotl.bnb_config_kwargs",
    ),
    **rows.lacking(
        "a changed configuration of the model", "overrides_of_model_config overrides_of_model_kwargs rope_scaling"
    ),
    **rows.lacking("norms in fp32", "fp32_norms"),
    **rows.lacking("fp8 training", "fp8"),
    **rows.lacking("reinforcement learning and preference methods", "rl", remedy=OTHER_METHOD),
    **rows.lacking(
        "reward models", "reward_model process_reward_model center_rewards_coefficient", remedy=OTHER_METHOD
    ),
    **rows.lacking("sequence classification", "num_labels", remedy=OTHER_METHOD),
    **rows.lacking("images and audio in the batches", "processor_type image_size", remedy=OTHER_METHOD),
    **rows.lacking("NEFTune's noise on embeddings", "neftune_noise_alpha noisy_embedding_alpha"),
    **rows.lacking("Grokfast's averaged gradients", "grokfast_alpha"),
    **rows.lacking("a search for the batch size", "auto_find_batch_size"),
    **rows.parallelism(tensor="tensor_parallel_size", expert="expert_parallel_size"),
    **rows.parallelism(context="context_parallel_size sequence_parallel_degree"),
    **rows.lacking("DeepCompile", "deepcompile"),
    **rows.lacking("a model split over several GPUs", "max_memory"),
    # what the figures leave out
    **rows.each("val_set_size test_datasets", shared.EVALUATION_STRATEGY),
    **rows.part_of("evaluation", "eval_strategy evaluation_strategy"),
    "eval_batch_size": rows.count(Setting.EVALUATION_BATCH),
    **rows.left_out("benchmarks and samples of an evaluation", "do_bench_eval do_causal_lm_eval generate_samples"),
    **rows.left_out("added or resized embeddings", "resize_token_embeddings_to_32x tokens added_tokens_overrides"),
    **rows.left_out("options of DDP", "ddp_find_unused_parameters ddp_bucket_cap_mb"),
    "model_config": rows.section(
        rows.lacking("a changed configuration of the model", "rope_scaling"), ignored="axolotl.model_config"
    ),
    "peft": rows.section(rows.lacking("LoftQ", "loftq_config")),
}


def finish_axolotl(reading: Reading, values: Mapping[str, Any]) -> None:
    """Read what depends on several keys: precision, adapter, kernels, evaluation, FSDP and DeepSpeed."""
    strategies = [values[key] for key in ("eval_strategy", "evaluation_strategy") if values.get(key) is not None]
    if strategies and rows.is_off(strategies[0]):
        reading.settings.pop(Setting.EVALUATES, None)
    if not rows.is_on(values, "gradient_accumulation_steps") and rows.is_on(values, "batch_size"):
        # utils/config, normalize_config
        whole = rows.whole_number_at(reading, "batch_size", values["batch_size"])
        reading.set("batch_size", {Setting.GRAD_ACCUM: max(whole // (reading.value(Setting.BATCH) or 1), 1)})
    if rows.is_on(values, "dp_shard_size"):
        shards = rows.whole_number_at(reading, "dp_shard_size", values["dp_shard_size"])
        reading.set("dp_shard_size", {Setting.GPUS: shards * (reading.value(Setting.REPLICATE) or 1)})
    _set_precision(reading, values)
    _set_adapter(reading, values)
    _set_kernels(reading, values)
    _leave_out_lora_kernels(reading, values)
    _set_selective(reading, values.get("selective_checkpointing"))
    _set_reentrant(reading, values)
    _set_packing(reading, values)
    if rows.is_on(values, "fsdp") or isinstance(values.get("fsdp_config"), Mapping):
        key = "fsdp" if "fsdp" in values else "fsdp_config"
        section_ = values.get("fsdp_config")
        if "fsdp_final_state_dict_type" in values:
            final = {"final_state_dict_type": values["fsdp_final_state_dict_type"]}
            section_ = {**section_, **final} if isinstance(section_, Mapping) else final
        shared.set_fsdp(reading, key, section_, version=1, outer=values.get("fsdp_version"))
    if isinstance(values.get("deepspeed"), Mapping):
        finish_deepspeed(reading, values["deepspeed"], "deepspeed.")


def _leave_out_lora_kernels(reading: Reading, values: Mapping[str, Any]) -> None:
    """Versions since 0.10 switch them on by themselves (schemas/config.py, check_auto_enable_lora_kernels)."""
    adapter, is_set = values.get("adapter"), any(values.get(name) is not None for name in _LORA_KERNEL_KEYS)
    keeps_plain = rows.is_on(values, "rl") or rows.is_on(values, "trust_remote_code")
    in_8_bits = adapter == "lora" and rows.is_on(values, "load_in_8bit")
    if adapter in ("lora", "qlora") and not (is_set or keeps_plain or in_8_bits):
        reading.left_out["adapter"] = f"{_LORA_KERNELS}, which version 0.10 and later switches on"


def _set_selective(reading: Reading, chosen: Any) -> None:
    """`true` keeps attention; an object lists what to keep, as axolotl or torch names it."""
    key, details = "selective_checkpointing", chosen if isinstance(chosen, Mapping) else {}
    if rows.is_off(chosen) and not details:
        return
    saved = details.get("save", ["attention"])
    names = [_SELECTIVE.get(str(name)) for name in saved] if isinstance(saved, list) else [None]
    if None in names or rows.is_on(details, "offload"):
        reading.lack(key, "this choice of kept outputs", setting=Setting.SELECTIVE)
        return
    reading.set(key, {Setting.SELECTIVE: "+".join(str(name) for name in names)})
    if not rows.is_on(details, "save_sliding_window") and "attention" in saved:
        reading.assumed.append("attention with a sliding window is kept, too; axolotl computes it again")


def _set_packing(reading: Reading, values: Mapping[str, Any]) -> None:
    """What keeps documents apart without flash attention (schemas/config.py, attn_decontaminates_packing)."""
    if not rows.is_on(values, "sample_packing"):
        return
    attention = reading.settings.get(Setting.ATTENTION)
    if attention is None:
        reading.set("sample_packing", {Setting.PACKING: Packing.PADDED})
    elif attention.value == "sdpa" and values.get("sdpa_varlen") is not False:
        reading.set("sample_packing", {Setting.PACKING: Packing.VARLEN})
    elif attention.value in ("sdpa", "eager"):
        reading.set("sample_packing", {Setting.PACKING: Packing.ROWS})


def _set_reentrant(reading: Reading, values: Mapping[str, Any]) -> None:
    """Where no kwargs are given, axolotl checkpoints the older way (utils/config, normalize_config).

    Its own ways of offloading and of selective checkpointing replace that.
    """
    replaced = reading.value(Setting.ACTIVATION_OFFLOAD) or rows.is_on(values, "selective_checkpointing")
    if values.get("gradient_checkpointing_kwargs") is None and not replaced:
        reading.defaults[Setting.REENTRANT] = True


def _set_precision(reading: Reading, values: Mapping[str, Any]) -> None:
    """Axolotl loads weights in the dtype it computes in (utils/config: resolve_dtype)."""
    fp16, bf16 = rows.is_on(values, "fp16"), values.get("bf16", "auto")
    if bf16 == "full":
        key, weights, autocast = "bf16", "bfloat16", "no"
    elif (not rows.is_off(bf16) and not (bf16 == "auto" and fp16)) or rows.is_on(values, "bfloat16"):
        key, weights, autocast = "bfloat16" if rows.is_off(bf16) else "bf16", "bfloat16", "bf16"
    elif fp16:
        key, weights, autocast = "fp16", "float16", "fp16"
    elif rows.is_on(values, "float16") or rows.is_on(values, "load_in_8bit"):
        key, weights, autocast = "float16", "float16", "no"
    else:
        key, weights, autocast = "bf16", "float32", "no"
    reading.set(key, {Setting.WEIGHTS: weights, Setting.AUTOCAST: autocast})


def _set_adapter(reading: Reading, values: Mapping[str, Any]) -> None:
    adapter = values.get("adapter")
    if rows.is_off(adapter):
        shared.without_adapter(reading)
        _note_wide_layers(reading, values)
        return
    if adapter not in ("lora", "qlora"):
        reading.lack("adapter", f"adapter {adapter}", remedy=OTHER_TRAINING, value=adapter)
        return
    for bits in (4, 8):
        if rows.is_on(values, f"load_in_{bits}bit"):
            reading.set(f"load_in_{bits}bit", {Setting.BITS: bits})
    reading.set("lora_r", {Setting.RANK: rows.whole_number_at(reading, "lora_r", values.get("lora_r") or 8)})
    if values.get("peft_autocast_adapter_dtype") is False and reading.value(Setting.WEIGHTS) == "bfloat16":
        reading.set("peft_autocast_adapter_dtype", {Setting.ADAPTER_DTYPE: "bfloat16"})
    if values.get("lora_model_dir"):
        reading.assumed.append("the adapter that lora_model_dir holds has the layers and rank of this file")
    if rows.is_on(values, "lora_target_linear"):
        reading.set("lora_target_linear", {Setting.LORA_TARGETS: "all-linear"})
    elif not rows.is_off(targets := values.get("lora_target_modules")):
        is_pattern = isinstance(targets, str) and targets != "all-linear"
        named = targets if isinstance(targets, str) else rows.modules_at(reading, "lora_target_modules", targets)
        reading.set("lora_target_modules", {Setting.LORA_TARGETS: f"pattern {named}" if is_pattern else named})


def _note_wide_layers(reading: Reading, values: Mapping[str, Any]) -> None:
    """Training all weights in 16 bits, axolotl keeps some layers in fp32 (loaders/model.py, `should_convert`)."""
    casts_back = reading.value(Setting.ATTENTION) not in (None, "sdpa", "eager") or _CCE in str(values.get("plugins"))
    is_sharded = rows.is_on(values, "fsdp") or rows.is_on(values, "fsdp_config")
    if reading.value(Setting.WEIGHTS) in ("bfloat16", "float16") and not casts_back and not is_sharded:
        reading.left_out["attn_implementation"] = (
            "fp32 weights of norms, embeddings and head, which axolotl casts back for flash attention only"
        )


def _set_kernels(reading: Reading, values: Mapping[str, Any]) -> None:
    plugins = values.get("plugins") or []
    plugins = [plugins] if isinstance(plugins, str) else plugins
    chosen: dict[str, frozenset[str]] = {}
    for plugin in plugins if isinstance(plugins, list) else ():
        if plugin == _LIGER:
            switches = {key.removeprefix("liger_"): value for key, value in values.items() if key.startswith("liger_")}
            chosen["liger"] = shared.liger_names(switches)
        elif plugin == _CCE:
            if values.get("cut_cross_entropy") is not False:
                chosen["cce"] = frozenset({"flce"})
        elif not str(plugin).endswith(_HARMLESS_PLUGINS):
            reading.lack("plugins", f"the plug-in {plugin}")
    if len(chosen) > 1:
        # cut-cross-entropy's loss, and liger-kernel's other kernels
        chosen = {"liger": chosen["liger"] - {"ce", "flce"} | {"flce:cce"}}
    for provider, names in chosen.items():
        if names:
            reading.set("plugins", {Setting.LIGER: names, Setting.PROVIDER: provider})


def _write_adapter(recipe: TrainingRecipe) -> Mapping[str, Any]:
    return {
        "adapter": "qlora" if recipe.qlora else "lora",
        "lora_r": recipe.lora or recipe.qlora,
        "lora_target_linear": True,
        **rows.BITS[recipe.packed_bits],
    }


_FUSED_LOSS = "liger_fused_linear_cross_entropy"
_SWITCHED_ON = ("liger_rope", "liger_rms_norm", "liger_glu_activation", _FUSED_LOSS)

AXOLOTL = rows.Framework(
    name="axolotl",
    title="a configuration of axolotl",
    rows=_ROWS,
    signature=frozenset(
        {"base_model", "micro_batch_size", "sequence_len", "sample_packing", "val_set_size", "adapter"}
    ),
    defaults={
        Setting.BATCH: 1,
        Setting.GRAD_ACCUM: 1,
        Setting.SEQ: 512,
        Setting.CHECKPOINTING: False,
        Setting.REENTRANT: False,
        Setting.OPTIMIZER: "adamw-fused",
        Setting.CLIP: 1.0,
    },
    finish=finish_axolotl,
    writes={
        **rows.as_read(_ROWS, "batch grad_accum seq checkpointing activation_offload optimizer lora_dropout attention"),
        **rows.adapter(_write_adapter),
        "checkpoint_every": shared.write_every,
        "grad_sync": shared.write_grad_sync,
        "selective": lambda recipe: {"selective_checkpointing": False} if recipe.selective is None else None,
        "liger": rows.liger(
            {"plugins": [_LIGER], **dict.fromkeys(_SWITCHED_ON, True)},
            fused_loss={"plugins": [_LIGER], _FUSED_LOSS: True},
        ),
    },
)
