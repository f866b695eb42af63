"""LLaMA-Factory's YAML of version 0 (`stage`, `finetuning_type`, …), and of version 1 (`dist_config`, …) by name."""

from collections.abc import Mapping
from typing import Any

from ligerprof.recipe.configs import rows, settings, shared, trainer
from ligerprof.recipe.configs.settings import OTHER_METHOD, OTHER_TRAINING, Lacking, Packing, Reading, Setting
from ligerprof.recipe.training import TrainingRecipe

_ROWS: Mapping[str, rows.Row] = {
    **trainer.ROWS,
    **rows.ignored_keys("llama-factory"),
    "model_name_or_path": rows.text(Setting.MODEL),
    "cutoff_len": rows.count(Setting.SEQ),
    "flash_attn": rows.Row(
        read=lambda value: (
            rows.UNSET if value == "auto" else shared.ATTENTION.read("disabled" if rows.is_off(value) else value)
        ),
        sets=Setting.ATTENTION,
        spell=lambda word: {"eager": "disabled"}.get(word, word),
    ),
    "packing": rows.turned_on({Setting.PACKING: Packing.PLAIN}),
    "neat_packing": rows.turned_on({Setting.PACKING: Packing.MASK}),
    # checkpointing.py, prepare_model_for_training: only the key below turns it off
    "gradient_checkpointing": rows.turned_on({Setting.CHECKPOINTING: True}),
    "disable_gradient_checkpointing": rows.switch(Setting.CHECKPOINTING, invert=True),
    "use_reentrant_gc": rows.switch(Setting.REENTRANT),
    "galore_rank": rows.count(Setting.GALORE_RANK),
    "lora_dropout": shared.LORA_DROPOUT,
    "additional_target": shared.modules(Setting.MODULES_TO_SAVE),
    "use_dora": rows.switch(Setting.DORA),
    "double_quantization": rows.switch(Setting.NESTED_QUANT),
    "use_galore": rows.turned_on({Setting.OPTIMIZER: "galore"}),
    "use_muon": rows.turned_on({Setting.OPTIMIZER: "muon"}),
    "use_adam_mini": rows.turned_on({Setting.OPTIMIZER: "adam-mini"}),
    "use_apollo": rows.turned_on({Setting.OPTIMIZER: "apollo"}),
    "use_badam": rows.turned_on({Setting.OPTIMIZER: "badam"}),
    **rows.part_of("adapter", "finetuning_type lora_rank lora_target quantization_bit quantization_method"),
    **rows.part_of("method", "stage"),
    # hparams/training_args.py: one process per worker
    "ray_num_workers": rows.count(Setting.GPUS),
    **rows.part_of("precision", "pure_bf16"),
    **rows.part_of("liger-kernel", "enable_liger_kernel"),
    # what recipes cannot express
    **rows.lacking("an optimizer that steps layer by layer", "galore_layerwise apollo_layerwise"),
    **rows.lacking("Unsloth", "use_unsloth use_unsloth_gc"),
    **rows.lacking("LLaMA Pro's added blocks", "use_llama_pro", remedy=OTHER_TRAINING),
    **rows.lacking("mixture of depths", "mixture_of_depths", remedy=OTHER_TRAINING),
    **rows.lacking("shifted sparse attention", "shift_attn"),
    **rows.lacking("norms in fp32", "upcast_layernorm"),
    **rows.lacking("logits in fp32", "upcast_lmhead_output"),
    **rows.lacking("another loss", "use_dft_loss use_asft_loss use_eaft_loss", remedy=OTHER_TRAINING),
    **rows.lacking("KTransformers, which trains experts on the CPU", "use_kt"),
    **rows.lacking("Megatron", "use_mca use_megatron_bridge use_hyper_parallel"),
    **rows.lacking("Megatron", "tensor_model_parallel_size expert_model_parallel_size pipeline_model_parallel_size"),
    **rows.lacking("Megatron", "use_distributed_optimizer sequence_parallel recompute_granularity"),
    **rows.parallelism(context="context_parallel_size"),
    **rows.lacking("fp8 training", "fp8"),
    **rows.lacking("a changed configuration of the model", "rope_scaling"),
    **rows.lacking("a merge of an adapter, which is not training", "export_dir", remedy=settings.NO_TRAINING),
    **rows.lacking(
        "a prediction run, which is not training", "do_predict predict_with_generate", remedy=settings.NO_TRAINING
    ),
    **rows.lacking("block-diagonal masks", "block_diag_attn"),
    **rows.lacking("images in the batches", "visual_inputs", remedy=OTHER_METHOD),
    **rows.lacking("an evaluation run, which is not training", "task", remedy=settings.NO_TRAINING),
    **rows.left_out(
        "added or resized embeddings", "resize_vocab add_tokens add_special_tokens new_special_tokens_config"
    ),
    **rows.left_out(shared.METRICS, "compute_accuracy"),
}


def _finish(reading: Reading, values: Mapping[str, Any]) -> None:
    """Read what depends on several keys: the method, the adapter, precision and liger-kernel."""
    trainer.finish(reading, values)
    stage, kind = values.get("stage", "sft"), values.get("finetuning_type", "lora")
    if "infer_backend" in values and not rows.is_on(values, "do_train"):
        reading.lack("infer_backend", "a run without training", remedy=settings.NO_TRAINING)
    if stage not in ("sft", "pt"):
        reading.lack("stage", f"the stage {stage}", remedy=OTHER_METHOD, value=stage)
    if kind not in ("lora", "full"):
        reading.lack("finetuning_type", f"{kind} tuning", remedy=OTHER_TRAINING, value=kind)
    if rows.is_on(values, "gradient_checkpointing"):
        # the Trainer's own switch, whatever the other one says
        reading.set("gradient_checkpointing", {Setting.CHECKPOINTING: True})
    elif values.get("gradient_checkpointing") is not None and reading.value(Setting.CHECKPOINTING):
        reading.assumed.append(
            "checkpointing is on: LLaMA-Factory turns it off by disable_gradient_checkpointing alone"
        )
    _set_adapter(reading, values, kind)
    _set_precision(reading, values, kind)
    if rows.is_on(values, "enable_liger_kernel"):
        reading.set("enable_liger_kernel", {Setting.LIGER: shared.LIGER_DEFAULTS, Setting.PROVIDER: "liger"})
    if stage == "pt" and "packing" not in values:
        reading.defaults[Setting.PACKING] = Packing.PLAIN


def _set_adapter(reading: Reading, values: Mapping[str, Any], kind: Any) -> None:
    bits = values.get("quantization_bit")
    if not rows.is_off(bits) and str(values.get("quantization_method", "bnb")).lower() not in ("bnb", "bitsandbytes"):
        reading.lack("quantization_method", "quantization other than bitsandbytes'")
    if kind != "lora":
        shared.without_adapter(reading)
        return
    rank = rows.whole_number_at(reading, "lora_rank", values.get("lora_rank") or 8)
    reading.set("lora_rank" if "lora_rank" in values else "finetuning_type", {Setting.RANK: rank})
    if not rows.is_off(bits):
        reading.set("quantization_bit", {Setting.BITS: rows.whole_number_at(reading, "quantization_bit", bits)})
    # adapter.py: resized embeddings are trained, and what is trained is cast to fp32
    if rows.is_on(values, "resize_vocab") and not rows.is_on(values, "additional_target"):
        reading.set("resize_vocab", {Setting.MODULES_TO_SAVE: settings.EMBEDDING_AND_HEAD})
    reading.defaults[Setting.FP32_SAVED_MODULES] = not rows.is_on(values, "pure_bf16")
    targets = values.get("lora_target", "all")
    named = "all-linear" if targets == "all" else rows.modules_at(reading, "lora_target", targets)
    reading.set("lora_target", {Setting.LORA_TARGETS: named})


def _set_precision(reading: Reading, values: Mapping[str, Any], kind: Any) -> None:
    """The model is loaded in the dtype of the computation; what is trained is cast up to fp32 (model/adapter.py)."""
    autocast = reading.value(Setting.AUTOCAST) or "no"
    if rows.is_on(values, "pure_bf16"):
        reading.set("pure_bf16", {Setting.WEIGHTS: "bfloat16", Setting.AUTOCAST: "no"})
    elif autocast == "no":
        reading.defaults[Setting.WEIGHTS] = "checkpoint"
    else:
        weights = "float32" if kind == "full" else {"bf16": "bfloat16", "fp16": "float16"}[autocast]
        reading.set(autocast, {Setting.WEIGHTS: weights, Setting.AUTOCAST: autocast})


def _write_adapter(recipe: TrainingRecipe) -> Mapping[str, Any]:
    return {
        "finetuning_type": "lora",
        "lora_rank": recipe.lora or recipe.qlora,
        "lora_target": "all",
        **({} if recipe.packed_bits is None else {"quantization_bit": recipe.packed_bits}),
    }


LLAMA_FACTORY = rows.Framework(
    name="llama-factory",
    title="a configuration of LLaMA-Factory",
    rows=_ROWS,
    signature=frozenset(
        {"stage", "finetuning_type", "cutoff_len", "template", "lora_target", "lora_rank", "dataset_dir"}
    ),
    defaults={**trainer.DEFAULTS, Setting.SEQ: 2048, Setting.CHECKPOINTING: True, Setting.REENTRANT: True},
    finish=_finish,
    writes={
        **trainer.WRITES,
        **rows.as_read(_ROWS, "seq lora_dropout attention"),
        **rows.adapter(_write_adapter),
        "checkpointing": lambda recipe: {"disable_gradient_checkpointing": not recipe.checkpointing},
        "liger": rows.liger({"enable_liger_kernel": True}),
    },
)

_DISTRIBUTED = {
    **rows.ignored_keys("llama-factory-1", "dist_config"),
    "name": rows.words(
        Setting.ENGINE, {"fsdp2": "fsdp2", "deepspeed": "deepspeed", "ddp": "ddp", "none": "torch"}, what="engine"
    ),
    **rows.part_of("the engine", "config_file"),
    **rows.parallelism(expert="ep_size", tensor="tp_size", context="cp_size"),
}
_VERSION_1: Mapping[str, rows.Row] = {
    **rows.ignored_keys("llama-factory-1"),
    "model": rows.text(Setting.MODEL),
    "micro_batch_size": rows.count(Setting.BATCH),
    "gradient_accumulation_steps": rows.count(Setting.GRAD_ACCUM, auto=True),
    "cutoff_len": rows.count(Setting.SEQ),
    "max_grad_norm": rows.number(Setting.CLIP),
    **rows.part_of("the dtype that FSDP gathers", "bf16"),
    "flash_attn": _ROWS["flash_attn"],
    "enable_activation_checkpointing": rows.switch(Setting.CHECKPOINTING),
    "optim": shared.OPTIMIZER,
    "dist_config": rows.section(_DISTRIBUTED),
    "batching_strategy": rows.words(
        Setting.PACKING,
        {"normal": rows.UNSET, "padding_free": Packing.PADDING_FREE, "dynamic_padding_free": Packing.PADDING_FREE},
        what="batching",
    ),
    **rows.parallelism(context="cp_size"),
    **rows.part_of("context parallelism", "cp_mode"),
    "global_batch_size": rows.count(Setting.TRAIN_BATCH),
    # kernels/interface.py: `auto` chooses kernels on NPUs only
    "kernel_config": rows.section(
        rows.lacking("kernels of version 1", "name", harmless=("auto",)), ignored="llama-factory-1.kernel_config"
    ),
    **rows.lacking("an optimizer of version 1", "optim_config"),
    **rows.lacking("an adapter of version 1", "peft_config"),
    **rows.lacking("a quantization of version 1", "quant_config"),
}

LLAMA_FACTORY_1 = rows.Framework(
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
