"""Which files evaluate, and with which batch."""

from pathlib import Path
from typing import Any

import pytest

from tests.recipe.configs.texts import read

TRAINER = {"model_name_or_path": "tiny", "output_dir": "out"}
AXOLOTL = {"base_model": "tiny", "datasets": [], "micro_batch_size": 2}


@pytest.mark.parametrize(
    ("keys", "batch"),
    [
        (TRAINER, None),
        ({**TRAINER, "per_device_eval_batch_size": 4}, None),
        ({**TRAINER, "eval_strategy": "no", "per_device_eval_batch_size": 4}, None),
        ({**TRAINER, "eval_strategy": "steps"}, 8),
        ({**TRAINER, "evaluation_strategy": "epoch", "per_device_eval_batch_size": 4}, 4),
        ({**TRAINER, "do_eval": True, "per_device_eval_batch_size": 3}, 3),
        ({**AXOLOTL, "eval_batch_size": 4}, None),
        ({**AXOLOTL, "val_set_size": 0.0}, None),
        ({**AXOLOTL, "val_set_size": 0.05}, 2),
        ({**AXOLOTL, "val_set_size": 0.05, "eval_batch_size": 4}, 4),
        ({**AXOLOTL, "val_set_size": 0.05, "eval_strategy": "no"}, None),
    ],
)
def test_files_that_evaluate(keys: dict[str, Any], batch: int | None, tmp_path: Path) -> None:
    recipe, _ = read(tmp_path, keys)
    assert recipe.eval_batch == batch


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"fsdp": "full_shard", "fsdp_config": {"fsdp_version": 2}},
        {"deepspeed": {"zero_optimization": {"stage": 2}}},
    ],
    ids=["ddp", "fsdp2", "deepspeed"],
)
def test_evaluation_on_several_gpus(keys: dict[str, Any], tmp_path: Path) -> None:
    values = {**TRAINER, "bf16": True, "eval_strategy": "steps", "per_device_eval_batch_size": 3, **keys}
    recipe, report = read(tmp_path, values, gpus=2)
    assert recipe.eval_batch == 3
    assert not any("evaluation" in what for what in report.left_out.values())


def test_the_command_line_wins(tmp_path: Path) -> None:
    recipe, _ = read(tmp_path, {**TRAINER, "eval_strategy": "steps"}, eval_batch=1)
    assert recipe.eval_batch == 1


@pytest.mark.parametrize(
    ("keys", "order"),
    [
        ({}, "random"),
        ({"group_by_length": True}, "grouped"),
        ({"train_sampling_strategy": "group_by_length"}, "grouped"),
        ({"train_sampling_strategy": "sequential"}, "file"),
        ({"train_sampling_strategy": "batch_rebalance"}, "random"),
    ],
)
def test_the_order_of_sequences(keys: dict[str, Any], order: str, tmp_path: Path) -> None:
    recipe, _ = read(tmp_path, {**TRAINER, **keys})
    assert recipe.length_order == order
