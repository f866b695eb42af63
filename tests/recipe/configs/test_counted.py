"""What the figures of a file depend on most is said for each file: GPUs, dtype of the weights, full sequences."""

from pathlib import Path
from typing import Any

import pytest

from ligerprof.errors import RecipeError, UnsupportedError
from ligerprof.recipe.configs.resolve import load_recipe
from tests.recipe.configs.texts import read, write

TRAINER = {"model_name_or_path": "tiny", "output_dir": "out", "max_seq_length": 128}
TRL = {"model_name_or_path": "tiny", "dataset_name": "imdb", "max_length": 128}
FACTORY = {"model_name_or_path": "tiny", "stage": "sft", "template": "default", "cutoff_len": 128, "bf16": True}
AXOLOTL = {"base_model": "tiny", "micro_batch_size": 2, "sequence_len": 128, "val_set_size": 0.1}
LAUNCHER = {"distributed_type": "MULTI_GPU", "num_processes": 4, "mixed_precision": "bf16"}
ZERO = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
FSDP = {"fsdp_version": 2, "fsdp_config": {"transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}, "bf16": True}
WHOLE = {**ZERO, "train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}


def said(report: Any, word: str) -> str:
    (sentence,) = (text for text in report.assumed if word in text)
    return str(sentence)


@pytest.mark.parametrize(
    ("documents", "given", "count", "why"),
    [
        ([TRL], {}, 1, "no file says how many train"),
        ([AXOLOTL], {}, 1, "no file says how many train"),
        ([TRL], {"gpus": 8}, 8, "--gpus"),
        ([TRL, LAUNCHER], {}, 4, "config-1.json: num_processes"),
        ([{**TRL, "num_processes": 2}], {}, 2, "config-0.json: num_processes"),
        ([TRAINER, {**LAUNCHER, "distributed_type": "NO"}], {}, 1, "config-1.json: distributed_type"),
        ([TRAINER, ZERO], {}, 1, "no file says how many train"),
        ([{**AXOLOTL, "dp_shard_size": 4, "dp_replicate_size": 2, **FSDP}], {}, 8, "config-0.json: dp_shard_size"),
        ([WHOLE], {}, 8, "config-0.json: train_batch_size"),
        ([WHOLE], {"batch": 1}, 8, "config-0.json: train_batch_size"),
        ([WHOLE], {"gpus": 2}, 2, "--gpus"),
    ],
)
def test_how_many_gpus_are_counted_and_why(
    documents: list[dict[str, Any]], given: dict[str, Any], count: int, why: str, tmp_path: Path
) -> None:
    recipe, report = read(tmp_path, *documents, **given)
    sentence = said(report, "counted: ")
    assert recipe.gpus == count
    assert sentence.startswith(f"{count} GPU")
    assert why in sentence


@pytest.mark.parametrize(
    ("documents", "given", "dtype", "why"),
    [
        ([TRAINER], {}, "bfloat16", "transformers 4 loads float32 (--precision fp32)"),
        ([{**TRAINER, "bf16": True}], {}, "bfloat16", "transformers 4 loads float32 (--precision amp)"),
        ([{**TRAINER, "torch_dtype": "auto"}], {}, "bfloat16", "the checkpoint's, as "),
        ([{**TRAINER, "dtype": "float32"}], {}, "float32", "config-0.json: dtype"),
        ([{**TRAINER, "model_name_or_path": "gpt2", "fp16": True}], {}, "float32", "the checkpoint's are"),
        ([TRL], {}, "float32", "weights (trl-sft's default)"),
        ([AXOLOTL], {}, "bfloat16", "config-0.json: bf16"),
        ([{**FACTORY, "finetuning_type": "full"}], {}, "float32", "config-0.json: bf16"),
        ([TRAINER, ZERO], {}, "bfloat16 with fp32 master copies", "config-1.json: bf16.enabled"),
        ([TRAINER], {"precision": "fp32"}, "float32", "--precision fp32"),
    ],
)
def test_the_dtype_of_the_weights_and_where_it_comes_from(
    documents: list[dict[str, Any]], given: dict[str, Any], dtype: str, why: str, tmp_path: Path
) -> None:
    recipe, report = read(tmp_path, *documents, **given)
    sentence = said(report, "weights in ")
    assert sentence.startswith(f"weights in {dtype}: ")
    assert why in sentence
    assert recipe.weight_dtype == dtype.partition(" ")[0]


def test_sequences_are_taken_as_full(tmp_path: Path) -> None:
    _, report = read(tmp_path, {**TRL, "max_length": 4096})
    assert "4,096 tokens" in said(report, "every sequence is taken as full")
    write(tmp_path, "lengths.txt", "10\n20\n")
    _, report = read(tmp_path, TRL, lengths=str(tmp_path / "lengths.txt"))
    assert not any("taken as full" in text for text in report.assumed)


@pytest.mark.parametrize("keys", [TRAINER, TRL, FACTORY, AXOLOTL], ids=["trainer", "trl", "factory", "axolotl"])
@pytest.mark.parametrize("name", ["sft.yaml", "dpo.yaml"])
def test_a_training_without_a_model_is_not_counted_for_another_one(
    keys: dict[str, Any], name: str, tmp_path: Path
) -> None:
    kept = {key: value for key, value in keys.items() if key not in ("model_name_or_path", "base_model")}
    # a name that this framework does not read
    file = write(tmp_path, name, str({**kept, "model": "mistralai/Mistral-7B-v0.1"}).replace("True", "true"))
    with pytest.raises(RecipeError, match=f"{name}: names no model that ligerprof reads. Give it with --model."):
        load_recipe([file], {})
    assert load_recipe([file], {"model": "tiny"})[0].spec.name == "tiny"


ADAPTER = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.1, "lora_target_modules": "all-linear"}


@pytest.mark.parametrize("name", ["lora.yaml", "full.yaml"])
@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ({**TRL, **ADAPTER}, ADAPTER),
        ({**TRAINER, "lora_r": 16, "peft_model_name_or_path": "x/y"}, ("lora_r", "peft_model_name_or_path")),
        ({**TRL, "use_lora": True, "lora_r": 8}, ("use_lora", "lora_r")),
        ({**TRL, "lora": {"r": 16}, "lora_modules_to_save": ["lm_head"]}, ("lora", "lora_modules_to_save")),
        ({**TRL, "use_ia3": True}, ("use_ia3",)),
        ({**AXOLOTL, **ADAPTER}, ADAPTER),
        ({**AXOLOTL, "peft_use_dora": True}, ("peft_use_dora",)),
    ],
    ids=str,
)
def test_keys_of_adapters_that_nothing_switches_on(keys: dict[str, Any], names: Any, name: str, tmp_path: Path) -> None:
    file = write(tmp_path, name, str(keys).replace("True", "true"))
    recipe, report = load_recipe([file], {})
    assert (recipe.lora, recipe.qlora) == (None, None)
    assert not set(names) & {*report.read, *report.ignored}
    assert all("which no key of the file switches on" in report.left_out[key] for key in names)
    assert any(line.startswith("left out: adapters, which no key") for line in report.lines())
    # counted by hand
    recipe, report = load_recipe([file], {"lora": 16})
    assert recipe.lora == 16
    assert not any("switches on" in what for what in report.left_out.values())


@pytest.mark.parametrize(
    ("keys", "switch"),
    [
        ({**TRL, "use_peft": False, **ADAPTER}, "use_peft"),
        ({**AXOLOTL, "adapter": None, **ADAPTER}, "adapter"),
        ({**FACTORY, "finetuning_type": "full", "lora_rank": 8, "lora_dropout": 0.1}, "finetuning_type"),
    ],
    ids=str,
)
def test_keys_of_adapters_that_the_file_switches_off(keys: dict[str, Any], switch: str, tmp_path: Path) -> None:
    recipe, report = read(tmp_path, keys)
    assert (recipe.lora, recipe.qlora) == (None, None)
    assert not [key for key in (*report.read, *report.left_out) if key.startswith("lora_")]
    assert said(report, "switches adapters off").startswith(f"{switch} switches adapters off: lora_r")


def test_adapters_that_are_trained_have_no_warning(tmp_path: Path) -> None:
    for keys in ({**TRL, "use_peft": True, **ADAPTER}, {**AXOLOTL, "adapter": "lora", **ADAPTER}, FACTORY):
        recipe, report = read(tmp_path, keys)
        assert recipe.lora
        assert not any("which no key of the file" in what for what in report.left_out.values())
        assert not any("switches adapters off" in text for text in report.assumed)


@pytest.mark.parametrize(
    ("keys", "checkpoints", "noted"),
    [
        ({}, True, False),
        ({"gradient_checkpointing": False}, True, True),
        ({"gradient_checkpointing": True}, True, False),
        ({"disable_gradient_checkpointing": True}, False, False),
        ({"gradient_checkpointing": False, "disable_gradient_checkpointing": True}, False, False),
        ({"gradient_checkpointing": True, "disable_gradient_checkpointing": True}, True, False),
    ],
    ids=str,
)
def test_what_switches_checkpointing_off_in_llama_factory(
    keys: dict[str, Any], checkpoints: bool, noted: bool, tmp_path: Path
) -> None:
    recipe, report = read(tmp_path, {**FACTORY, **keys})
    assert recipe.checkpointing is checkpoints
    assert any("disable_gradient_checkpointing alone" in text for text in report.assumed) is noted


@pytest.mark.parametrize(
    ("keys", "saved", "in_fp32"),
    [
        ({}, None, False),
        ({"additional_target": "embed_tokens,lm_head"}, "embed_tokens+lm_head", True),
        ({"additional_target": "lm_head", "pure_bf16": True}, "lm_head", False),
        ({"resize_vocab": True}, "embed_tokens+lm_head", True),
        ({"resize_vocab": True, "additional_target": "norm"}, "norm", True),
        ({"resize_vocab": True, "finetuning_type": "full"}, None, False),
    ],
    ids=str,
)
def test_what_llama_factory_trains_in_full_next_to_adapters(
    keys: dict[str, Any], saved: str | None, in_fp32: bool, tmp_path: Path
) -> None:
    recipe, report = read(tmp_path, {**FACTORY, **keys})
    assert (recipe.modules_to_save, recipe.fp32_saved_modules) == (saved, in_fp32)
    # the new rows of the embedding
    assert ("resize_vocab" in report.left_out) == ("resize_vocab" in keys)


@pytest.mark.parametrize("name", ["axolotl.yaml", "llama.yaml"])
def test_axolotl_evaluates_with_the_micro_batch_whatever_that_becomes(name: str, tmp_path: Path) -> None:
    file = write(tmp_path, name, str(AXOLOTL))
    recipe, _ = load_recipe([file], {"batch": 4})
    assert (recipe.batch, recipe.eval_batch) == (4, 4)
    from ligerprof.recipe.categories import Axis

    assert recipe.resized(Axis.BATCH, 9).eval_batch == 9
    assert recipe.evaluation is not None
    assert (recipe.evaluation.batch, recipe.evaluation.eval_batch) == (4, None)
    assert load_recipe([file], {"batch": 4, "eval_batch": 1})[0].eval_batch == 1
    fixed = write(tmp_path, "fixed.yaml", str({**AXOLOTL, "eval_batch_size": 1}))
    assert load_recipe([fixed], {"batch": 4})[0].eval_batch == 1


@pytest.mark.parametrize("name", ["run.yaml", "train.json", "llama3.toml"])
def test_torchtitan_is_recognized_in_toml_alone(name: str, tmp_path: Path) -> None:
    values = '{"model": {"name": "llama3"}, "training": {"batch_size": 2, "seq_len": 64}}'
    toml = '[model]\nname = "llama3"\n[training]\nbatch_size = 2\nseq_len = 64\n'
    file = write(tmp_path, name, toml if name.endswith(".toml") else values)
    if name.endswith(".toml"):
        assert load_recipe([file], {"model": "tiny"})[1].files[0][1] == "torchtitan"
        return
    with pytest.raises(RecipeError, match="not the configuration of a training run that ligerprof knows"):
        load_recipe([file], {"model": "tiny"})


def test_the_whole_batch_has_to_be_of_whole_gpus(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="train_batch_size of 60 is not a multiple of 8"):
        read(tmp_path, {**WHOLE, "train_batch_size": 60})
