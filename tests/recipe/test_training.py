import json
from typing import Any

import pytest

from ligerprof.errors import LigerprofError, RecipeError, UnknownModelError, UnsupportedError
from ligerprof.models import CONFIGS, ModelSpec, load_model
from ligerprof.recipe.categories import FlceBudget
from ligerprof.recipe.conflicts import require_supported
from ligerprof.recipe.training import RECIPE_OPTIONS, TrainingRecipe


# one model of each architecture
@pytest.mark.parametrize("model", sorted({config["model_type"]: name for name, config in CONFIGS.items()}.values()))
def test_recipe_survives_json(model: str) -> None:
    recipe = TrainingRecipe(model=model, liger="all", seq=512, memory_limit_bytes=24 * 2**30, flce_budget=2**28)
    again = TrainingRecipe.from_json(json.loads(json.dumps(recipe.to_json())))
    assert again.to_json() == recipe.to_json()
    assert again.spec.parameter_count == recipe.spec.parameter_count


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"batch": 0}, "batch"),
        ({"warmup": 0}, "warmup"),
        ({"padding": 1.0}, "padding"),
        ({"clip": -1.0}, "clip"),
        ({"zero": 4}, "zero is 4"),
        ({"zero": 3}, "needs --engine deepspeed"),
        ({"gpus": 2}, r"needs --engine ddp, .*--engine fsdp2 or --engine deepspeed"),
        ({"offload": "all"}, "needs --engine deepspeed, or --engine fsdp2 for --offload all"),
        ({"offload": "all", "engine": "ddp"}, "needs --engine deepspeed, or --engine fsdp2"),
        ({"precision": "mixed"}, "needs --engine deepspeed or --engine fsdp2"),
        ({"precision": "mixed", "engine": "ddp", "gpus": 2}, "needs --engine deepspeed or --engine fsdp2"),
        ({"precision": "mixed-fp16", "engine": "fsdp2"}, "does not scale the loss"),
        ({"precision": "amp-fp16", "engine": "fsdp2"}, "does not scale the loss"),
        ({"engine": "fsdp2", "offload": "optimizer"}, "Choose --offload all"),
        ({"engine": "fsdp2", "optimizer": "muon"}, "muon is not supported on FSDP2's shards"),
        (
            {"engine": "fsdp2", "optimizer": "deepspeed-cpu-adam", "offload": "all"},
            "needs --engine deepspeed and an offloaded",
        ),
        ({"engine": "fsdp2", "qlora": 8}, "--qlora is not supported with --engine fsdp2"),
        ({"engine": "fsdp2", "lora": 8, "precision": "bf16"}, "weights of one dtype"),
        ({"engine": "fsdp2", "gpus": 6, "replicate": 4}, "not a multiple"),
        ({"compile": True, "engine": "ddp", "gpus": 2}, "--compile needs --engine torch"),
        ({"compile": True, "activation_offload": True}, "--compile does not go with --activation-offload"),
        ({"replicate": 0}, "replicate"),
        ({"reshard": False}, "--no-reshard needs .*--engine fsdp2"),
        ({"wrap": "accelerate", "engine": "ddp"}, "--wrap accelerate needs --engine fsdp2"),
        ({"reduce_dtype": "bfloat16"}, "--reduce-dtype bfloat16 needs .*--engine fsdp2"),
        ({"reduce_dtype": "float16", "engine": "fsdp2"}, "unknown reduce dtype"),
        ({"grad_sync": "every"}, "--grad-sync every needs --engine ddp.* or --engine fsdp2"),
        ({"engine": "deepspeed"}, "mixed"),
        ({"engine": "deepspeed", "precision": "mixed", "offload": "all", "zero": 2}, "--zero 3"),
        ({"engine": "deepspeed", "precision": "mixed", "offload": "optimizer"}, "--zero 1, 2 or 3"),
        ({"optimizer": "deepspeed-cpu-adam"}, "offload"),
        ({"optimizer": "adam"}, "unknown optimizer"),
        ({"gpu": "h2000"}, "unknown GPU"),
        ({"flce_budget": "huge"}, "flce budget"),
        ({"flce_budget": 0}, "flce budget"),
        ({"lora": 8, "qlora": 8}, "--lora 8 does not go with --qlora 8. Leave one of them out"),
        ({"lora": 0}, "lora"),
        ({"quantization": "8bit"}, "--quantization 8bit needs --lora"),
        ({"quantization": "4bit"}, "--quantization 4bit needs --lora"),
        ({"qlora": 8, "quantization": "8bit"}, "Use --lora 8 with --quantization 8bit"),
        ({"lora": 8, "quantization": "8bit", "dora": True}, "--dora does not go with --quantization 8bit yet"),
        ({"lora": 8, "quantization": "8bit", "engine": "fsdp2"}, "not supported with --engine fsdp2 yet"),
        ({"lora": 8, "quantization": "3bit"}, "unknown quantization"),
        ({"lora_dropout": 0.1}, "--lora-dropout 0.1 needs --lora or --qlora"),
        ({"lora": 8, "lora_dropout": 1}, "It must be at least 0 and below 1"),
        ({"lora_targets": "q_proj"}, "--lora-targets needs --lora or --qlora"),
        ({"lora": 8, "lora_targets": "q_proj+c_attn"}, "no linear layer 'c_attn'. It has: q_proj, k_proj"),
        ({"qlora": 8, "lora_targets": ""}, "no linear layer ''"),
        ({"lora": 8, "lora_targets": "lm_head", "dora": True}, "Leave --lora-targets lm_head out"),
        ({"lora": 8, "lora_targets": "lm_head", "loss": "chunked-nll"}, "would ignore its adapters"),
        (
            {"lora": 8, "lora_targets": "lm_head", "liger": "flce", "provider": "liger"},
            "flce of liger reads the head's",
        ),
        ({"lora": 8, "lora_targets": "lm_head", "modules_to_save": "lm_head"}, "train one weight"),
        ({"lora": 8, "lora_targets": "lm_head", "engine": "ddp"}, "not supported with --engine ddp yet"),
        ({"reentrant": True, "checkpointing": False}, "--reentrant"),
        ({"loss": "hf-4.45", "liger": "flce"}, "same loss"),
        ({"loss": "chunked-nll", "liger": "flce"}, "same loss"),
        ({"loss": "titan-chunked", "engine": "ddp", "gpus": 2}, "covered with --engine torch only"),
        ({"loss": "torch-linear", "model": "gemma2-2b"}, "gemma2-2b caps its logits"),
        ({"loss": "titan-chunked", "batch": 1, "seq": 100}, "splits 100 tokens into 8 equal chunks"),
        ({"loss": "titan-chunked", "precision": "amp-fp16"}, "before the loss is scaled"),
        ({"liger": "geglu"}, "no operation"),
        ({"liger": "rms+rms"}, "twice"),
        ({"liger": "rms:liger+rms:torch"}, "twice"),
        ({"liger": "rms:+flce"}, "'rms:' in 'rms:.flce' names no provider. Write it as in rms:torch"),
        ({"liger": "ce+flce"}, "same loss"),
        ({"liger": "rsm"}, "unknown kernel"),
        ({"model": "gpt2-xl", "liger": "rope"}, "no operation"),
        ({"model": "gpt2-xl", "seq": 2048}, "learned positions"),
        ({"model": "llama9"}, "unknown model"),
        ({"model": 9}, "model is 9"),
        ({"batch": "4"}, "batch is '4'. It must be a whole number"),
        ({"batch": True}, "batch is True"),
        ({"seq": 1024.0}, "seq is 1024.0"),
        ({"padding": "half"}, "padding is 'half'"),
        ({"padding": float("nan")}, "padding is nan"),
        ({"checkpointing": 1}, "checkpointing is 1"),
        ({"precision": 16}, "unknown precision 16"),
        ({"precision": None}, "unknown precision None"),
        ({"alloc_conf": 1}, "alloc_conf is 1"),
        ({"deepspeed_config": 1}, "deepspeed_config is 1"),
        ({"optimizer": ["sgd"]}, "unknown optimizer"),
    ],
)
def test_wrong_options_get_one_line_and_a_usage_error(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(RecipeError, match=says) as caught:
        TrainingRecipe(**wrong)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_default_optimizer_follows_the_offload() -> None:
    offloaded = TrainingRecipe(engine="deepspeed", precision="mixed-fp16", zero=3, offload="all")
    assert (TrainingRecipe().optimizer, offloaded.optimizer) == ("adamw-fused", "deepspeed-cpu-adam")
    assert (TrainingRecipe().clip, offloaded.clip) == (None, 1.0)


@pytest.mark.parametrize(
    ("liger", "model", "kernels"),
    [
        ("none", "llama3.2-1b", ()),
        ("all", "llama3.2-1b", ("rope", "rms", "swiglu", "flce")),
        ("no-flce", "llama3.2-1b", ("rope", "rms", "swiglu")),
        ("all", "gemma2-2b", ("rope", "rms", "geglu", "flce")),
        ("all", "gpt2-xl", ("layernorm", "flce")),
        ("flce,rms", "llama3.2-1b", ("rms", "flce")),
        ("ce+swiglu", "llama3.2-1b", ("swiglu", "ce")),
    ],
)
def test_kernel_sets(liger: str, model: str, kernels: tuple[str, ...]) -> None:
    assert TrainingRecipe(model=model, liger=liger, seq=512).kernels == kernels


def test_fsdp2_keeps_its_shards_in_fp32_under_mixed() -> None:
    dtypes = {
        (precision, reduced): (recipe.weight_dtype, recipe.gathered_dtype, recipe.compute_dtype, recipe.reduction_dtype)
        for precision, reduced in (("mixed", None), ("mixed", "bfloat16"), ("amp", None), ("bf16", None))
        for recipe in (TrainingRecipe(engine="fsdp2", gpus=2, precision=precision, reduce_dtype=reduced),)
    }
    assert dtypes == {
        ("mixed", None): ("float32", "bfloat16", "bfloat16", "float32"),
        ("mixed", "bfloat16"): ("float32", "bfloat16", "bfloat16", "bfloat16"),
        ("amp", None): ("float32", "float32", "bfloat16", "float32"),
        ("bf16", None): ("bfloat16", "bfloat16", "bfloat16", "bfloat16"),
    }


def test_ddp_warms_up_twice() -> None:
    warmups = [TrainingRecipe(engine=engine, warmup=warmup).warmup for engine in ("torch", "ddp") for warmup in (1, 3)]
    assert warmups == [1, 3, 2, 3]


def test_a_weight_is_sharded_over_the_gpus_of_one_copy() -> None:
    assert TrainingRecipe(engine="fsdp2", gpus=8, replicate=2).shards == 4
    assert TrainingRecipe(engine="ddp", gpus=8).shards == 1


def test_precisions_say_their_dtypes() -> None:
    dtypes = {
        precision: (recipe.weight_dtype, recipe.compute_dtype)
        for precision in ("amp", "amp-fp16", "bf16-amp", "bf16", "fp16", "fp32")
        for recipe in (TrainingRecipe(precision=precision),)
    }
    assert dtypes == {
        "amp": ("float32", "bfloat16"),
        "amp-fp16": ("float32", "float16"),
        "bf16-amp": ("bfloat16", "bfloat16"),
        "bf16": ("bfloat16", "bfloat16"),
        "fp16": ("float16", "float16"),
        "fp32": ("float32", "float32"),
    }


def test_what_is_not_built_is_named() -> None:
    with pytest.raises(UnsupportedError, match="--attention flash"):
        require_supported(TrainingRecipe(attention="flash"), command="step")
    require_supported(TrainingRecipe(lora=8), command="step")


def test_flce_budget_takes_words_and_sizes() -> None:
    budget = RECIPE_OPTIONS["flce_budget"]
    assert budget.parse("lean") is FlceBudget.LEAN
    assert budget.parse("250MiB") == 250 * 2**20
    with pytest.raises(LigerprofError, match="not a size"):
        budget.parse("plenty")


def test_a_spec_is_taken_as_it_is() -> None:
    spec: ModelSpec = load_model("tiny")
    assert TrainingRecipe(model=spec).spec is spec


def test_a_provider_per_kernel() -> None:
    recipe = TrainingRecipe(liger="flce:liger+RMS:torch+rope", provider="cce")
    assert recipe.kernels == ("rope", "rms", "flce")
    assert recipe.providers == {"rope": "cce", "rms": "torch", "flce": "liger"}
    assert recipe.provider_names == "cce+torch+liger"
    read = TrainingRecipe.from_json(recipe.to_json())
    assert (read.providers, read.to_json()) == (recipe.providers, recipe.to_json())
    assert hash(recipe) == hash(TrainingRecipe(liger="flce:liger+RMS:torch+rope", provider="cce"))
    assert TrainingRecipe(liger="all", provider="liger").provider_names == "liger"


def test_recipes_of_older_files_have_one_provider() -> None:
    older = {**TrainingRecipe(liger="rms+flce").to_json(), "provider": "liger", "kernels": ["rms", "flce"]}
    assert TrainingRecipe.from_json(older).providers == {"rms": "liger", "flce": "liger"}


@pytest.mark.parametrize("config", [None, [], 5, "llama", {}, {"model_type": 3}], ids=repr)
def test_a_damaged_description_of_the_model_is_refused(config: object) -> None:
    values = {**TrainingRecipe(model="tiny").to_json(), "model_config": config}
    with pytest.raises(UnknownModelError, match="tiny: the config has no 'model_type'"):
        TrainingRecipe.from_json(values)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "amp, checkpointed"),
        ({"lora": 8}, "amp, LoRA 8, checkpointed"),
        ({"lora": 8, "dora": True}, "amp, DoRA 8, checkpointed"),
        ({"qlora": 8, "lora_dropout": 0.05}, "amp, LoRA 8 over 4-bit weights with dropout 0.05, checkpointed"),
        ({"qlora": 16}, "amp, LoRA 16 over 4-bit weights, checkpointed"),
        ({"lora": 16, "quantization": "4bit"}, "amp, LoRA 16 over 4-bit weights, checkpointed"),
        ({"lora": 16, "quantization": "8bit"}, "amp, LoRA 16 over 8-bit weights, checkpointed"),
    ],
    ids=str,
)
def test_the_summary_names_the_adapters(options: dict[str, Any], words: str) -> None:
    assert words in TrainingRecipe(model="tiny", **options).summary
