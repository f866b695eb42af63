"""TRL's SFTConfig: its loss, and what liger-kernel replaces next to it."""

from pathlib import Path
from typing import Any

import pytest

from tests.recipe.configs.texts import read

BASE = {"model_name_or_path": "tiny", "dataset_name": "imdb", "max_length": 128, "use_peft": False}
LAYERS = "rms rope swiglu"


@pytest.mark.parametrize(
    ("keys", "loss", "kernels"),
    [
        ({}, "trl-tiled", ""),
        ({"loss_type": "nll"}, "trl-tiled", ""),
        ({"loss_type": "chunked_nll"}, "trl-tiled", ""),
        ({"loss_type": "dft"}, "trl-tiled", ""),
        ({"use_liger_kernel": True}, "trl-tiled", LAYERS),
        ({"use_liger_kernel": True, "liger_kernel_config": {"cross_entropy": True}}, "trl-tiled", LAYERS),
        (
            {"use_liger_kernel": True, "liger_kernel_config": {"fused_linear_cross_entropy": True}},
            "hf",
            f"flce {LAYERS}",
        ),
    ],
    ids=str,
)
def test_the_loss_is_that_of_newer_versions(keys: dict[str, Any], loss: str, kernels: str, tmp_path: Path) -> None:
    recipe, report = read(tmp_path, {**BASE, **keys})
    assert (recipe.loss, set(recipe.kernels)) == (loss, set(kernels.split()))
    assert any("TRL 1.15" in line for line in report.assumed) == (loss == "trl-tiled")


def test_an_older_loss_is_chosen_on_the_command_line(tmp_path: Path) -> None:
    recipe, _ = read(tmp_path, {**BASE, "use_liger_kernel": True}, liger="all", provider="liger", loss="hf")
    assert (recipe.loss, recipe.provider, set(recipe.kernels)) == ("hf", "liger", {*LAYERS.split(), "flce"})


def test_padding_to_a_multiple_chosen_by_trl(tmp_path: Path) -> None:
    recipe, report = read(tmp_path, {**BASE, "pad_to_multiple_of": "auto"})
    assert recipe.pad_to_multiple_of == 1
    assert not report.unknown


def test_trl_reads_the_number_of_processes_from_its_file(tmp_path: Path) -> None:
    recipe, report = read(tmp_path, {**BASE, "num_processes": 4})
    assert (recipe.engine, recipe.gpus) == ("ddp", 4)
    assert not report.unknown


@pytest.mark.parametrize(
    ("keys", "means"),
    [
        ({}, ("float32", True)),
        # TRL casts adapters over 4-bit weights to bf16, and quantizes scales only if asked
        ({"load_in_4bit": True}, ("bfloat16", False)),
        ({"load_in_4bit": True, "use_bnb_nested_quant": True}, ("bfloat16", True)),
        ({"load_in_4bit": True, "bf16": False, "fp16": True}, ("float32", False)),
    ],
    ids=str,
)
def test_adapters_over_4_bit_weights(keys: dict[str, Any], means: tuple[str, bool], tmp_path: Path) -> None:
    recipe, _ = read(tmp_path, {**BASE, "use_peft": True, **keys})
    assert (recipe.adapter_dtype, recipe.nested_quant) == means


@pytest.mark.parametrize(("stage", "adapts", "reentrant"), [(3, True, True), (2, True, False), (3, False, False)])
def test_adapters_under_zero_3_are_checkpointed_the_older_way(
    stage: int, adapts: bool, reentrant: bool, tmp_path: Path
) -> None:
    values = {**BASE, "use_peft": adapts, "bf16": True, "gradient_checkpointing": True}
    values["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    deepspeed = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    recipe, _ = read(tmp_path, values, deepspeed, loss="hf")
    assert (recipe.zero, recipe.reentrant) == (stage, reentrant)
