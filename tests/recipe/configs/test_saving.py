"""What configuration files say of saving: the whole model, which gathers it, or shards."""

from pathlib import Path
from typing import Any

import pytest

from ligerprof.errors import RecipeError
from ligerprof.recipe.configs.resolve import load_recipe
from tests.recipe.configs.texts import read, write

TRAINER = {"per_device_train_batch_size": 1, "output_dir": "o", "bf16": True, "model_name_or_path": "tiny"}
ADAPTER = {"model_name_or_path": "tiny", "dataset_name": "d", "use_peft": True, "bf16": True, "max_length": 64}
AXOLOTL = {"base_model": "tiny", "micro_batch_size": 1, "sequence_len": 64, "bf16": True, "fsdp_version": 2}
FACTORY = {"model_name_or_path": "tiny", "stage": "sft", "finetuning_type": "full", "cutoff_len": 64, "bf16": True}
ZERO_AXOLOTL = {key: value for key, value in AXOLOTL.items() if key != "fsdp_version"}
GATHERS = "stage3_gather_16bit_weights_on_model_save"
SHARDED, FULL = "SHARDED_STATE_DICT", "FULL_STATE_DICT"


def fsdp(**keys: Any) -> dict[str, Any]:
    return {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {"fsdp_version": 2, **keys}}


def zero(**keys: Any) -> dict[str, Any]:
    return {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": {"zero_stage": 3, **keys}}


@pytest.mark.parametrize(
    ("documents", "whole"),
    [
        ([TRAINER, fsdp()], True),
        ([TRAINER, fsdp(fsdp_state_dict_type=SHARDED)], False),
        ([TRAINER, fsdp(fsdp_state_dict_type="full_state_dict")], True),
        ([TRAINER, fsdp(fsdp_state_dict_type=3)], False),
        ([TRAINER, {**fsdp(fsdp_state_dict_type=SHARDED), "distributed_type": "MULTI_GPU"}], True),
        ([{**AXOLOTL, "fsdp_config": {"state_dict_type": SHARDED}}], False),
        ([{**AXOLOTL, "fsdp_config": {"final_state_dict_type": FULL, "state_dict_type": SHARDED}}], True),
        ([{**AXOLOTL, "fsdp_final_state_dict_type": FULL, "fsdp_config": {"state_dict_type": SHARDED}}], True),
        ([TRAINER, {**zero(zero3_save_16bit_model=False), "mixed_precision": "bf16"}], False),
        ([TRAINER, {**zero(zero3_save_16bit_model=True), "mixed_precision": "bf16"}], True),
        ([{**TRAINER, "deepspeed": {"zero_optimization": {"stage": 3, GATHERS: False}}}], False),
        # off by default: the Trainer warns, and saves shards
        ([{**TRAINER, "deepspeed": {"zero_optimization": {"stage": 3, GATHERS: "auto"}}}], False),
        ([{**TRAINER, "deepspeed": {"zero_optimization": {"stage": 3}}}], False),
        ([{**TRAINER, "deepspeed": {"zero_optimization": {"stage": 3, GATHERS: True}}}], True),
        ([TRAINER, {**zero(), "mixed_precision": "bf16"}], False),
        # files that frameworks ship
        ([{**FACTORY, "deepspeed": "examples/deepspeed/ds_z3_config.json"}], True),
        ([{**ZERO_AXOLOTL, "deepspeed": "deepspeed_configs/zero3_bf16.json"}], True),
        ([{**ADAPTER, "use_peft": False, "accelerate_config": "zero3"}], True),
        # adapters are gathered in any case
        ([{**ADAPTER, "deepspeed": {"zero_optimization": {"stage": 3, GATHERS: False}}}], True),
    ],
)
def test_how_the_model_is_saved(documents: list[dict[str, Any]], whole: bool, tmp_path: Path) -> None:
    recipe, report = read(tmp_path, *documents)
    assert recipe.save_whole is whole
    assert not report.unknown


def test_torchtitan_saves_shards(tmp_path: Path) -> None:
    text = '[training]\nseq_len = 64\n[parallelism]\n[activation_checkpoint]\nmode = "full"\n'
    recipe, _ = load_recipe([write(tmp_path, "llama.toml", text)], {"model": "tiny", "gpus": 2})
    assert (recipe.engine.value, recipe.save_whole) == ("fsdp2", False)


def test_a_type_that_torch_does_not_have_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"fsdp_state_dict_type is 'HALF'.*not FULL_STATE_DICT"):
        read(tmp_path, TRAINER, fsdp(fsdp_state_dict_type="HALF"))
