"""Sections and keys that change nothing are not refused: switched off, for other engines, or equal to the default."""

import json
from pathlib import Path
from typing import Any

import pytest

from ligerprof.errors import RecipeError, UnsupportedError
from ligerprof.recipe.configs.resolve import load_options, load_recipe
from ligerprof.recipe.configs.rows import known_keys
from ligerprof.recipe.configs.settings import Ignored, Reason
from ligerprof.recipe.configs.sources import BY_NAME, recognize
from tests.recipe.configs.texts import read

ZERO = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}
LAUNCHER = {"distributed_type": "NO", "mixed_precision": "bf16", "num_processes": 1}
OFF = {"enabled": False}
# frameworks whose data file has keys of the top level
WITH_KEYS = (
    "accelerate",
    "axolotl",
    "deepspeed",
    "fsdp",
    "llama-factory",
    "open-instruct",
    "torchtitan",
    "transformers",
)


def deepspeed(tmp_path: Path, **sections: Any) -> tuple[Any, Any]:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**ZERO, **sections}))
    return load_recipe([str(path)], {"model": "tiny", "seq": 128})


@pytest.mark.parametrize(
    "section",
    [
        *("amp", "elasticity", "data_efficiency", "curriculum_learning", "progressive_layer_drop", "eigenvalue"),
        *("hybrid_engine", "quantize_training", "sparse_attention"),
    ],
)
def test_a_section_of_deepspeed_counts_only_if_it_is_enabled(section: str, tmp_path: Path) -> None:
    recipe, report = deepspeed(tmp_path, **{section: {**OFF, "max_out_tokens": 512}})
    assert (recipe.zero, report.unknown) == (2, ())
    with pytest.raises(UnsupportedError, match=rf"ds\.json: {section}: "):
        deepspeed(tmp_path, **{section: {"enabled": True}})


@pytest.mark.parametrize(("enabled", "is_read"), [(False, True), (True, False)])
def test_compression_counts_if_one_of_its_parts_is_enabled(enabled: bool, is_read: bool, tmp_path: Path) -> None:
    parts = {
        "weight_quantization": {"shared_parameters": {**OFF, "rounding": "nearest"}, "different_groups": {}},
        "row_pruning": {"shared_parameters": {"enabled": enabled}},
    }
    if is_read:
        assert deepspeed(tmp_path, compression_training=parts)[0].zero == 2
    else:
        with pytest.raises(UnsupportedError, match="compressed training"):
            deepspeed(tmp_path, compression_training=parts)


@pytest.mark.parametrize("on", [False, True])
def test_activation_checkpointing_of_deepspeed_has_no_effect_and_says_so_if_it_is_on(on: bool, tmp_path: Path) -> None:
    keys = {"partition_activations": on, "cpu_checkpointing": on, "number_checkpoints": None, "profile": False}
    recipe, report = deepspeed(tmp_path, activation_checkpointing=keys)
    assert recipe == deepspeed(tmp_path)[0]
    assert any("activation_checkpointing has no effect" in sentence for sentence in report.assumed) is on


@pytest.mark.parametrize(
    ("word", "sections", "is_default"),
    [
        ("fp16", {"fp16": {"enabled": True}, "bf16": OFF}, True),
        ("bf16", {}, True),
        ("fp32", {"bf16": OFF}, True),
        ("auto", {}, True),
        (None, {}, True),
        ("fp32", {}, False),
        ("fp16", {}, False),
    ],
)
def test_the_dtype_of_communication_counts_if_it_is_not_that_of_the_training(
    word: str | None, sections: dict[str, Any], is_default: bool, tmp_path: Path
) -> None:
    keys = {"communication_data_type": word, **sections}
    if is_default:
        assert deepspeed(tmp_path, **keys)[0] == deepspeed(tmp_path, **sections)[0]
    else:
        with pytest.raises(UnsupportedError, match=r"communication_data_type: .* communication in another dtype"):
            deepspeed(tmp_path, **keys)


def test_a_dtype_of_communication_that_the_trainer_decides_is_assumed_equal(tmp_path: Path) -> None:
    ds = {**ZERO, "bf16": {"enabled": "auto"}, "communication_data_type": "bf16"}
    _, report = read(tmp_path, {"model_name_or_path": "tiny", "output_dir": "o", "bf16": True, "deepspeed": ds})
    assert "deepspeed.communication_data_type of bf16 is the dtype of the training" in report.assumed


@pytest.mark.parametrize(
    "keys",
    [
        {"downcast_bf16": True},
        {"downcast_bf16": "yes"},
        {"fsdp_config": {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_offload_params": True}},
        {"megatron_lm_config": {"megatron_lm_tp_degree": 2}},
        {"deepspeed_config": {"zero_stage": 3, "gradient_accumulation_steps": 4, "deepspeed_config_file": "absent"}},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_sections_of_other_engines_have_no_effect_in_accelerates_files(keys: dict[str, Any], tmp_path: Path) -> None:
    trainer = {"model_name_or_path": "tiny", "max_length": 128, "dataset_name": "d"}
    plain, _ = read(tmp_path, trainer, LAUNCHER)
    recipe, report = read(tmp_path, trainer, {**LAUNCHER, **keys})
    assert recipe == plain
    assert set(report.ignored) >= {next(iter(keys))} or any(
        name.startswith(next(iter(keys))) for name in report.ignored
    )


def test_the_same_section_counts_for_its_engine(tmp_path: Path) -> None:
    keys = {**LAUNCHER, "distributed_type": "FSDP", "num_processes": 2}
    path = tmp_path / "a.json"
    path.write_text(
        json.dumps({**keys, "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}})
    )
    with pytest.raises(UnsupportedError, match="wrapping of modules by size"):
        load_options([str(path)], {"model": "tiny"})


@pytest.mark.parametrize("inside", ["../other", "."])
def test_a_path_of_another_machine_is_looked_for_by_its_name_next_to_the_file(inside: str, tmp_path: Path) -> None:
    keys = {"model_name_or_path": "tiny", "output_dir": "o", "bf16": True, "deepspeed": "/home/you/run/z3.json"}
    there = tmp_path / inside
    there.mkdir(exist_ok=True)
    (there / "z3.json").write_text(json.dumps(ZERO))
    if inside == ".":
        recipe, report = read(tmp_path, keys)
        assert recipe.zero == 2
        assert any("/home/you/run/z3.json is not here: " in sentence for sentence in report.assumed)
    else:
        with pytest.raises(RecipeError, match="which is not in this folder"):
            read(tmp_path, keys)


@pytest.mark.parametrize(
    "name",
    ["/home/you/project/configs/ds/z3.json", "C:\\\\work\\\\project\\\\configs\\\\ds\\\\z3.json".replace("\\\\", "\\")],
)
def test_a_path_of_another_machine_is_looked_for_by_its_last_parts(name: str, tmp_path: Path) -> None:
    (tmp_path / "configs" / "ds").mkdir(parents=True)
    (tmp_path / "configs" / "ds" / "z3.json").write_text(json.dumps(ZERO))
    recipe, report = read(tmp_path, {"model_name_or_path": "tiny", "output_dir": "o", "bf16": True, "deepspeed": name})
    assert recipe.zero == 2
    assert any("is not here: " in sentence and "in its place" in sentence for sentence in report.assumed)


@pytest.mark.parametrize(
    ("keys", "framework"),
    [
        ({"pipe-parallel-size": 1, "model-parallel-size": 1, "num-layers": 12}, "GPT-NeoX"),
        ({"pipe_parallel_size": 1, "train_micro_batch_size_per_gpu": 4, "zero_optimization": {}}, "GPT-NeoX"),
        ({"data_path": "d", "vocab_file": "v", "merge_file": "m", "save": "c"}, "GPT-NeoX"),
        ({"max_seq_len": 2048, "model": {"name": "mpt"}, "train_loader": {}, "max_duration": "1ep"}, "LLM Foundry"),
        ({"data": {}, "model": {"partial_pretrain": "m"}, "optim": {}, "trainer": {}}, "verl"),
        ({"data": {}, "algorithm": {}, "worker": {"actor": {}}, "trainer": {}}, "EasyR1"),
        ({"sft_type": "lora", "model_type": "qwen", "template_type": "AUTO", "dataset": []}, "ms-swift"),
        ({"tuner_backend": "peft", "sft_type": "lora", "batch_size": 1}, "ms-swift"),
    ],
)
def test_files_of_frameworks_that_are_not_read_are_refused_by_name(keys: dict[str, Any], framework: str) -> None:
    with pytest.raises(RecipeError, match=rf"a\.yaml: a configuration of {framework}, whose files"):
        recognize(keys, "a.yaml")


@pytest.mark.parametrize("name", WITH_KEYS)
def test_keys_of_the_data_files_have_no_other_row(name: str) -> None:
    rows = BY_NAME[name].rows
    for reason, names in known_keys(name)["sections"][""].items():
        for key in names:
            assert rows[key].read("a value of any kind") == Ignored(reason=Reason(reason)), key
