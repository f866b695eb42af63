"""wandb's config.yaml of a run: unwrapped, and read with the sizes of the model in it."""

from pathlib import Path
from typing import Any

import pytest

from ligerprof.errors import LigerprofError, RecipeError, UnsupportedError
from ligerprof.models import load_model
from ligerprof.recipe.configs.resolve import load_recipe
from tests.recipe.configs.texts import read, write

ARGUMENTS: dict[str, Any] = {
    "output_dir": "o",
    "per_device_train_batch_size": 2,
    "per_gpu_train_batch_size": None,
    "gradient_accumulation_steps": 4,
    "gradient_checkpointing": False,
    "eval_strategy": "no",
    "max_grad_norm": 1.0,
    "adafactor": False,
    "bf16": True,
    "fp16": False,
    "optim": "adamw_torch",
    "fsdp": [],
    "fsdp_config": {"min_num_params": 0, "xla": False, "xla_fsdp_v2": False, "xla_fsdp_grad_ckpt": False},
    "deepspeed": None,
    "use_cpu": False,
    "hub_token": "<HUB_TOKEN>",
}
# what model configs write next to their sizes
MODEL: dict[str, Any] = {
    **load_model("qwen3-0.6b").config,
    "_name_or_path": "someone/my-sft",
    "transformers_version": "4.52.1",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "max_length": 20,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "is_encoder_decoder": False,
    "id2label": {"0": "LABEL_0"},
    "pruned_heads": {},
    "gradient_checkpointing": False,
}
ADAPTER: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_dropout": 0.0,
    "target_modules": ["v_proj", "q_proj"],
    "modules_to_save": None,
    "use_dora": False,
}
QUANTIZED = {
    "load_in_4bit": True,
    "load_in_8bit": False,
    "_load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
    "quant_method": "bitsandbytes",
}


def run_file(folder: Path, keys: dict[str, Any], *, old: bool = False) -> str:
    wrapped: dict[str, Any] = {
        key: {"desc": None, "value": value} if old else {"value": value} for key, value in keys.items()
    }
    own = {"wandb_version": 1} if old else {}
    return write(folder, "config.yaml", str({**own, "_wandb": {"value": {"t": {}}}, **wrapped}).replace("None", "null"))


def of_run(folder: Path, keys: dict[str, Any], **given: Any) -> Any:
    return load_recipe([run_file(folder, keys)], {"seq": 512, **given})


@pytest.mark.parametrize("old", [False, True])
def test_a_run_of_the_trainer_means_what_its_arguments_and_its_model_say(old: bool, tmp_path: Path) -> None:
    recipe, report = load_recipe([run_file(tmp_path, {**MODEL, **ARGUMENTS}, old=old)], {"seq": 512})
    plain, _ = read(tmp_path, {**ARGUMENTS, "model_name_or_path": "qwen3-0.6b", "dtype": "bfloat16"}, seq=512)
    assert recipe.spec.name == "someone/my-sft"
    assert recipe.spec.parameters == plain.spec.parameters
    for name in ("batch", "grad_accum", "precision", "checkpointing", "optimizer", "engine", "clip", "loss", "lora"):
        assert getattr(recipe, name) == getattr(plain, name)
    assert report.files == ((str(tmp_path / "config.yaml"), "wandb"),)
    assert report.unknown == ()
    assert "weights were loaded in bfloat16, the torch_dtype of the run" in report.assumed


def test_trl_and_its_length_are_known_by_their_arguments(tmp_path: Path) -> None:
    sft = {"max_length": 384, "packing": False, "dataset_text_field": "text", "completion_only_loss": None}
    recipe, _ = load_recipe([run_file(tmp_path, {**MODEL, **ARGUMENTS, **sft})], {})
    assert (recipe.seq, recipe.loss) == (384, "trl-tiled")
    # a generation's length is no length of training
    older = {**sft, "max_length": 20, "max_seq_length": 256}
    assert load_recipe([run_file(tmp_path, {**MODEL, **ARGUMENTS, **older})], {})[0].seq == 256
    with pytest.raises(UnsupportedError, match="Only supervised fine-tuning"):
        of_run(tmp_path, {**MODEL, **ARGUMENTS, "num_generations": 8, "num_iterations": 1, "epsilon": 0.2})


def test_adapters_and_packed_weights_are_those_of_the_run(tmp_path: Path) -> None:
    keys = {**MODEL, **ARGUMENTS, "peft_config": {"default": ADAPTER}}
    recipe, _ = of_run(tmp_path, keys)
    assert (recipe.lora, set(recipe.lora_targets.split("+")), recipe.quantization) == (4, {"q_proj", "v_proj"}, None)
    recipe, _ = of_run(tmp_path, {**keys, "quantization_config": QUANTIZED})
    assert (recipe.lora, recipe.qlora, recipe.nested_quant) == (None, 4, True)
    recipe, _ = of_run(tmp_path, {**keys, "quantization_config": {**QUANTIZED, "bnb_4bit_use_double_quant": False}})
    assert recipe.nested_quant is False
    dora, _ = of_run(tmp_path, {**keys, "peft_config": {"default": {**ADAPTER, "use_dora": True}}})
    assert dora.dora


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"peft_config": {"default": {**ADAPTER, "peft_type": "PROMPT_TUNING"}}}, "PROMPT_TUNING"),
        ({"peft_config": {"default": "LoraConfig(r=8)"}}, "an adapter that is unreadable"),
        ({"peft_config": {"default": {**ADAPTER, "r": "x"}}}, r"config\.yaml: peft_config\.r is 'x', not a number"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "weights of gptq"),
        ({"torch_dtype": {"a": 1}}, r"config\.yaml: torch_dtype is .*, not a word"),
        ({"hidden_size": "wide"}, r"config\.yaml: someone/my-sft: "),
        ({"model_type": "qwen2_vl", "text_config": {}}, "vision tower|qwen2_vl"),
    ],
)
def test_what_a_run_has_beyond_recipes_is_named(keys: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(LigerprofError, match=says):
        of_run(tmp_path, {**MODEL, **ARGUMENTS, **keys})


@pytest.mark.parametrize(("version", "precision"), [("4.39.1", "amp"), ("5.1.0", "bf16-amp")])
def test_a_run_without_a_dtype_has_that_of_its_version(version: str, precision: str, tmp_path: Path) -> None:
    recipe, _ = of_run(tmp_path, {**MODEL, **ARGUMENTS, "torch_dtype": None, "transformers_version": version})
    assert recipe.precision == precision


def test_a_run_of_another_program_is_read_as_its_keys_say(tmp_path: Path) -> None:
    keys = {"model_name_or_path": "tiny", "per_device_train_batch_size": 3, "output_dir": "o", "bf16": True}
    recipe, report = of_run(tmp_path, keys)
    assert (recipe.model.name, recipe.batch, report.files[0][1]) == ("tiny", 3, "transformers")
    named, _ = load_recipe([f"transformers={run_file(tmp_path, keys)}"], {"seq": 512})
    assert named == recipe
    with pytest.raises(RecipeError, match=r"config\.yaml: not the configuration of a training run"):
        of_run(tmp_path, {"embed_size": 32, "gpu": 0, "hidden_size": 64})
    sweep = {"program": "train.py", "parameters": {"learning_rate": {"value": 1}}}
    with pytest.raises(RecipeError, match="not the configuration of a training run"):
        read(tmp_path, sweep)
