"""Files that name other files, files of frameworks' own folders, and files that only look like a training run's."""

import json
from pathlib import Path
from typing import Any

import pytest

from ligerprof.errors import RecipeError, UnsupportedError
from ligerprof.recipe.configs.resolve import load_recipe
from ligerprof.recipe.configs.rows import known_keys
from ligerprof.recipe.configs.sources import recognize
from tests.recipe.configs.texts import read

AXOLOTL = {"base_model": "tiny", "micro_batch_size": 1, "gradient_accumulation_steps": 2, "bf16": True}
FACTORY = {"model_name_or_path": "tiny", "stage": "sft", "finetuning_type": "full", "bf16": True}
TRL = {"model_name_or_path": "tiny", "max_length": 128, "dataset_name": "d"}
TRAINER = {"model_name_or_path": "tiny", "per_device_train_batch_size": 2, "output_dir": "out", "bf16": True}


@pytest.mark.parametrize(
    ("keys", "means"),
    [
        ({**AXOLOTL, "deepspeed": "deepspeed_configs/zero1.json"}, (1, "none")),
        ({**AXOLOTL, "deepspeed": "/workspace/axolotl/deepspeed_configs/zero2.json"}, (2, "optimizer")),
        ({**AXOLOTL, "deepspeed": "deepspeed_configs/zero3_bf16_cpuoffload_all.json"}, (3, "all")),
        ({**FACTORY, "deepspeed": "examples/deepspeed/ds_z2_offload_config.json"}, (2, "optimizer")),
        ({**FACTORY, "deepspeed": "examples/deepspeed/ds_z3_config.json"}, (3, "none")),
        ({**TRL, "accelerate_config": "zero3"}, (3, "none")),
    ],
)
def test_files_that_the_framework_ships_need_not_be_there(
    keys: dict[str, Any], means: tuple[int, str], tmp_path: Path
) -> None:
    recipe, report = read(tmp_path, keys)
    assert (recipe.engine.value, recipe.precision.value) == ("deepspeed", "mixed")
    assert (recipe.zero, recipe.offload.value) == means
    assert any("is not here: " in sentence for sentence in report.assumed)
    assert report.unknown == ()


def test_a_file_that_is_there_wins_over_the_shipped_one(tmp_path: Path) -> None:
    (tmp_path / "zero2.json").write_text(json.dumps({"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}))
    recipe, report = read(tmp_path, {**AXOLOTL, "deepspeed": "zero2.json"})
    assert recipe.zero == 1
    assert not any("is not here" in sentence for sentence in report.assumed)


@pytest.mark.parametrize("name", sorted(known_keys("trl")["files"]))
def test_presets_of_trl(name: str, tmp_path: Path) -> None:
    recipe, _ = read(tmp_path, {**TRL, "accelerate_config": name})
    engine, gpus = {
        "single_gpu": ("torch", 1),
        "multi_gpu": ("ddp", 8),
        "fsdp1": ("fsdp1", 8),
        "fsdp2": ("fsdp2", 8),
    }.get(name, ("deepspeed", 8))
    assert (recipe.engine.value, recipe.gpus) == (engine, gpus)


def test_the_number_of_processes_wins_over_that_of_the_launchers_file(tmp_path: Path) -> None:
    recipe, _ = read(tmp_path, {**TRL, "accelerate_config": "zero2", "num_processes": 4})
    assert (recipe.zero, recipe.gpus) == (2, 4)


def test_another_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"deepspeed names ds_z3_config\.json, which is not in this folder"):
        read(tmp_path, {**AXOLOTL, "deepspeed": "ds_z3_config.json"})


@pytest.mark.parametrize(("fsdp", "engine"), [("full_shard auto_wrap", "fsdp2"), (None, "torch")])
def test_fsdp_config_is_a_file_that_counts_with_fsdp_alone(fsdp: str | None, engine: str, tmp_path: Path) -> None:
    (tmp_path / "fsdp.json").write_text(json.dumps({"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}))
    recipe, report = read(tmp_path, {**TRAINER, "fsdp": fsdp, "fsdp_config": "fsdp.json"})
    assert recipe.engine.value == engine
    assert len(report.files) == (2 if fsdp else 1)


def test_the_settings_of_fsdp_are_recognized_alone(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.json"
    path.write_text(json.dumps({"fsdp_version": 2, "fsdp_offload_params": True, "fsdp_reshard_after_forward": False}))
    recipe, report = load_recipe([str(path)], {"model": "tiny", "seq": 128})
    assert (recipe.engine.value, recipe.offload.value, recipe.reshard) == ("fsdp2", "all", False)
    assert report.files[0][1] == "fsdp"


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("framework", ["deepspeed", "accelerate"])
def test_parameters_stay_on_the_gpu_below_stage_3(framework: str, stage: int, tmp_path: Path) -> None:
    offload = {f"offload_{part}": {"device": "cpu"} for part in ("optimizer", "param")}
    keys: dict[str, Any] = {"zero_optimization": {"stage": stage, **offload}, "bf16": {"enabled": True}}
    if framework == "accelerate":
        devices = {f"offload_{part}_device": "cpu" for part in ("optimizer", "param")}
        keys = {
            "distributed_type": "DEEPSPEED",
            "mixed_precision": "bf16",
            "num_processes": 2,
            "deepspeed_config": {"zero_stage": stage, **devices},
        }
    path = tmp_path / "file.json"
    path.write_text(json.dumps(keys))
    recipe, report = load_recipe([str(path)], {"model": "tiny", "seq": 128})
    assert (recipe.zero, recipe.offload.value) == (stage, "optimizer")
    assert any("offload_param has no effect" in sentence for sentence in report.assumed)


@pytest.mark.parametrize(
    "keys",
    [
        # a mixture of data
        {"datasets": [{"json_path": "a.json", "sampling_strategy": "all"}]},
        # a trainer of nanotron's kind
        {
            "general": {"project": "p", "run": "r", "seed": 8},
            "model": {"ddp_bucket_cap_mb": 25, "dtype": "bfloat16", "model_config": {"hidden_size": 576, "is_x": True}},
            "optimizer": {"clip_grad": 1.0, "zero_stage": 0, "weight_decay": 0.1, "learning_rate_scheduler": {"a": 1}},
            "parallelism": {"dp": 64, "pp": 1, "tp": 1, "tp_mode": "REDUCE_SCATTER"},
            "tokens": {"micro_batch_size": 8, "sequence_length": 2048},
        },
        # a script of someone's own
        {
            "model": {"name_or_path": "Qwen/Qwen3-8B", "torch_dtype": "bfloat16", "attn_implementation": "sdpa"},
            "data": {"path": "train.jsonl", "max_length": 4096},
            "training": {"output_dir": "out", "per_device_train_batch_size": 2, "learning_rate": 1e-5, "seed": 1},
        },
    ],
    ids=["data", "nanotron", "own"],
)
def test_files_of_other_programs_are_not_taken_for_one_of_ours(keys: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="not the configuration of a training run that ligerprof knows"):
        recognize(keys, "file.yaml")


def test_unknown_keys_that_may_change_memory_are_left_out_by_name(tmp_path: Path) -> None:
    _, report = read(tmp_path, {**TRL, "quant": "4bit", "my_note": "x"})
    assert report.unknown == ("quant", "my_note")
    assert set(report.left_out) == {"quant"}
    assert report.omissions == ("keys that ligerprof does not know, and that may change memory (quant)",)


OPEN_INSTRUCT = {
    "model_name_or_path": "tiny",
    "max_seq_length": 128,
    "with_tracking": True,
    "checkpointing_steps": "epoch",
}


@pytest.mark.parametrize(
    ("keys", "means"),
    [
        ({}, ("bf16", None, None, "adamw-fused", 8, False, False)),
        ({"gradient_checkpointing": True, "packing": True}, ("bf16", None, None, "adamw-fused", 8, True, True)),
        ({"use_lora": True}, ("bf16", 64, None, "adamw-fused", 8, False, False)),
        ({"use_lora": True, "use_qlora": True, "lora_rank": 4}, ("bf16", None, 4, "paged-adamw", 8, False, False)),
        (
            {"use_lora": False, "lora_rank": 64, "clip_grad_norm": -1},
            ("bf16", None, None, "adamw-fused", 8, False, False),
        ),
    ],
)
def test_files_of_open_instruct(keys: dict[str, Any], means: tuple[Any, ...], tmp_path: Path) -> None:
    recipe, report = read(tmp_path, {**OPEN_INSTRUCT, **keys})
    assert report.files[0][1] == "open-instruct"
    assert report.unknown == ()
    found = (recipe.precision, recipe.lora, recipe.qlora, recipe.optimizer, recipe.batch)
    assert (*found, recipe.checkpointing, recipe.packing) == means
    assert (recipe.clip, recipe.reentrant, recipe.attention) == (0, False, "flash")


def test_preference_methods_of_open_instruct_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="dpo_beta: 5: DPO or another preference method"):
        read(tmp_path, {**OPEN_INSTRUCT, "dpo_beta": 5})


def test_a_file_that_two_others_name_is_read_once(tmp_path: Path) -> None:
    zero = tmp_path / "zero.json"
    zero.write_text(json.dumps({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}), encoding="utf-8")
    launcher = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": str(zero)}}
    recipe, report = read(tmp_path, {**TRAINER, "deepspeed": str(zero)}, launcher)
    assert recipe.zero == 2
    assert [file for file, framework in report.files if framework == "deepspeed"] == [str(zero)]
