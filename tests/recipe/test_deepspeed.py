import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ligerprof.analyzers.estimate import estimate
from ligerprof.errors import RecipeError
from ligerprof.recipe.deepspeed import deepspeed_config, zero_settings
from ligerprof.recipe.flags import recipe_flags
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Role

ZERO_3 = {"engine": "deepspeed", "precision": "mixed-fp16", "zero": 3, "offload": "all", "model": "tiny"}


def recipe(**options: Any) -> TrainingRecipe:
    return TrainingRecipe(**{**ZERO_3, **options})


def test_the_recipe_decides_batch_precision_stage_and_place() -> None:
    config = deepspeed_config(recipe(batch=2, grad_accum=3, gpus=4, clip=0.5))
    assert config["train_batch_size"] == 24
    assert (config["fp16"]["enabled"], config["bf16"]["enabled"]) == (True, False)
    assert config["gradient_clipping"] == 0.5
    zero = config["zero_optimization"]
    assert (zero["stage"], zero["offload_optimizer"]["device"], zero["offload_param"]["device"]) == (3, "cpu", "cpu")


@pytest.mark.parametrize(
    ("options", "optimizer", "parameters"),
    [
        ({"zero": 0, "offload": "none"}, "none", None),
        ({"zero": 2, "offload": "optimizer"}, "cpu", None),
        ({"zero": 3, "offload": "none"}, "none", "none"),
        ({"zero": 3, "offload": "optimizer"}, "cpu", "none"),
    ],
)
def test_only_what_is_offloaded_leaves_the_gpu(options: dict[str, Any], optimizer: str, parameters: str | None) -> None:
    zero = zero_settings(recipe(**options))
    assert zero["offload_optimizer"]["device"] == optimizer
    assert zero.get("offload_param", {}).get("device") == parameters


def test_a_disk_gets_buffers_that_the_largest_parameter_fits_in(tmp_path: Path) -> None:
    on_disk = recipe(offload="nvme", nvme_path=str(tmp_path))
    place = zero_settings(on_disk)["offload_param"]
    assert (place["device"], place["nvme_path"], place["pin_memory"]) == ("nvme", str(tmp_path), True)
    assert place["buffer_size"] == max(parameter.elements for parameter in on_disk.spec.parameters)


def test_a_clip_is_given_unless_it_is_switched_off() -> None:
    assert deepspeed_config(recipe())["gradient_clipping"] == 1.0
    assert deepspeed_config(recipe(clip=0.0))["gradient_clipping"] == 0.0


AGREEING = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": 4,
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}, "sub_group_size": 5},
    "fp16": {"enabled": True, "loss_scale_window": 7},
    "wall_clock_breakdown": False,
}


def test_what_agrees_is_merged_and_auto_is_left_to_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(AGREEING))
    config = deepspeed_config(recipe(deepspeed_config=str(file)))
    assert config["train_micro_batch_size_per_gpu"] == 4
    assert config["wall_clock_breakdown"] is False
    assert config["fp16"] == {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 7}
    assert config["zero_optimization"]["offload_param"] == {"device": "cpu", "pin_memory": True}
    assert config["zero_optimization"]["sub_group_size"] == 5
    # what was not mentioned stays
    assert config["zero_optimization"]["reduce_bucket_size"] == 500_000_000


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        ({"train_batch_size": 8}, "train_batch_size is 8, --batch times"),
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage is 2, --zero says 3"),
        ({"zero_optimization": {"offload_optimizer": {"device": "none"}}}, "--offload says 'cpu'"),
        ({"bf16": {"enabled": True}}, "--precision says False"),
        ({"gradient_clipping": 2.0}, "--clip says 1.0"),
        ({"optimizer": {"type": "AdamW"}}, "'optimizer' out; --optimizer"),
        ({"scheduler": {"type": "WarmupLR"}}, "'scheduler' out"),
        ({"fp16": False}, "fp16 is False. Give it an object"),
        ({"zero_optimization": {"sub_group_size": {"x": {}}}}, "sub_group_size is {'x': {}}. Give it a number"),
        ({"zero_optimization": {"reduce_bucket_size": "5e8"}}, "reduce_bucket_size is '5e8'. Give it a number"),
        ({"zero_optimization": {"overlap_comm": 1}}, "Give it true or false"),
    ],
)
def test_what_contradicts_the_recipe_is_one_line(theirs: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe(deepspeed_config=theirs)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "[]", "{", "\x00", '"auto"'])
def test_a_file_that_is_no_configuration_is_one_line(content: str, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(content)
    with pytest.raises(RecipeError, match=r"ds\.json: not"):
        recipe(deepspeed_config=str(file))
    with pytest.raises(RecipeError, match="no such file"):
        recipe(deepspeed_config=str(tmp_path / "nowhere.json"))


def test_a_configuration_belongs_to_deepspeed() -> None:
    with pytest.raises(RecipeError, match="needs --engine deepspeed"):
        TrainingRecipe(deepspeed_config=AGREEING)


def test_a_recipe_keeps_its_configuration() -> None:
    kept = recipe(deepspeed_config=AGREEING)
    again = TrainingRecipe.from_json(json.loads(json.dumps(kept.to_json())))
    assert deepspeed_config(again) == deepspeed_config(kept)


def test_a_printed_command_has_its_configuration_as_text() -> None:
    kept = recipe(deepspeed_config=AGREEING)
    words = iter(recipe_flags(kept))
    text = next(next(words) for word in words if word == "--deepspeed-config")

    assert deepspeed_config(recipe(deepspeed_config=text)) == deepspeed_config(kept)
    with pytest.raises(RecipeError, match="--deepspeed-config: not readable as JSON"):
        recipe(deepspeed_config="{'overlap_comm': False}")


LEAVES = st.one_of(st.booleans(), st.integers(0, 10), st.text(max_size=3), st.none(), st.just(5e8))
KEYS = st.sampled_from(["fp16", "zero_optimization", "stage", "enabled", "aio", "reduce_bucket_size", "x"])
INNER = st.recursive(LEAVES, lambda inner: st.dictionaries(KEYS, inner, max_size=3))


@given(st.dictionaries(KEYS, INNER, max_size=4))
def test_any_object_is_merged_or_refused_in_one_line(theirs: dict[str, Any]) -> None:
    try:
        accepted = recipe(deepspeed_config=theirs)
    except RecipeError as error:
        refusal = str(error)
    else:
        merged, refusal = deepspeed_config(accepted), ""
        assert (merged["zero_optimization"]["stage"], merged["fp16"]["enabled"]) == (3, True)
        # the closed form calculates with it
        assert isinstance(merged["zero_optimization"]["reduce_bucket_size"], int)
    assert "\n" not in refusal


def test_the_closed_form_reads_the_same_bucket() -> None:
    plain = recipe(zero=3, offload="none")
    smaller = dataclasses.replace(
        plain, deepspeed_config={"zero_optimization": {"reduce_bucket_size": 100_000_000}}, optimizer="default"
    )
    saved = estimate(plain).roles[Role.COMMUNICATION] - estimate(smaller).roles[Role.COMMUNICATION]
    assert saved == 2 * 400_000_000
