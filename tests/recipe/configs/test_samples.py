"""Configurations that frameworks ship as examples: what each means, or what a recipe lacks for it.

`sample.json` says what each file means. Where a recipe does not have an option or a word yet, the file must be refused
by the name of what is lacking; it becomes a recipe as soon as the option exists. `index.json` has the verdict on all
examples of the repositories, by `benchmarks/read_configs.py`.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ligerprof.errors import LigerprofError, RecipeError, UnknownModelError, UnsupportedError
from ligerprof.recipe.configs.resolve import load_options
from ligerprof.recipe.configs.sources import read_sources
from ligerprof.recipe.training import RECIPE_OPTIONS, TrainingRecipe
from tests.paths import DATA
from tests.recipe.configs.texts import read

FILES = DATA / "configs" / "files"
SAMPLE: list[dict[str, Any]] = json.loads((DATA / "configs" / "sample.json").read_text(encoding="utf-8"))
INDEX: dict[str, Any] = json.loads((DATA / "configs" / "index.json").read_text(encoding="utf-8"))
# shares that the documentation quotes
KNOWN_KEYS = 0.95
RECIPES = 0.95


def path_of(row: dict[str, Any]) -> Path:
    return FILES / row["repository"].replace("/", "+") / row["path"]


def is_lacking(name: str, value: Any) -> bool:
    declared = RECIPE_OPTIONS.get(name)
    return declared is None or (isinstance(value, str) and bool(declared.choices) and value not in declared.choices)


@pytest.mark.parametrize("row", SAMPLE, ids=lambda row: row["path"])
def test_each_file_means_what_the_sample_says(row: dict[str, Any]) -> None:
    source = str(path_of(row))
    given = {"model": "llama3.2-1b"} if row.get("unknown_model") else {}
    if "error" in row:
        with pytest.raises(LigerprofError) as caught:
            load_options([source], given)
        assert f"{row['path']}: {row['error']} is not supported yet" in str(caught.value)
    elif any(is_lacking(name, value) for name, value in row["means"].items()):
        with pytest.raises(UnsupportedError, match="is not supported yet"):
            load_options([source], given)
    else:
        options, report = load_options([source], given)
        recipe = TrainingRecipe(**options)
        found = {name: getattr(recipe, name) for name in row["means"] if name not in ("model", "liger")}
        assert found == {name: value for name, value in row["means"].items() if name not in ("model", "liger")}
        assert "model" not in row["means"] or recipe.spec.name == row["means"]["model"]
        assert set(recipe.kernels) == set(row["means"].get("liger", "").split("+")) - {""}
        assert report.files[0][1] == row["framework"]
    assert [key for reading in read_sources([source]) for key in reading.unknown] == row.get("unknown", [])


@pytest.mark.parametrize("row", [row for row in SAMPLE if row.get("unknown_model")], ids=lambda row: row["path"])
def test_a_model_that_is_not_in_the_catalog_is_named(row: dict[str, Any]) -> None:
    with pytest.raises((UnknownModelError, UnsupportedError)) as caught:
        load_options([str(path_of(row))], {})
    assert str(path_of(row)) in str(caught.value)


def test_the_sample_has_every_repository() -> None:
    counts = Counter(row["repository"] for row in SAMPLE)
    assert sum(counts.values()) >= 60
    assert set(counts) == set(INDEX["repositories"]) - {"pytorch/torchtitan"}


def test_the_examples_of_all_repositories_are_read_without_unknown_keys() -> None:
    read = [row for row in INDEX["files"] if row["verdict"] != "not read"]
    clean = [row for row in read if not row.get("unknown")]
    assert len(clean) >= KNOWN_KEYS * len(read)
    assert len(read) > 400


def test_files_become_recipes_where_no_part_is_lacking() -> None:
    counts = Counter(row["verdict"] for row in INDEX["files"])
    assert set(counts) <= {"recipe", "lacks", "refused", "not read"}
    assert counts["recipe"] >= RECIPES * (counts["recipe"] + counts["refused"])
    assert counts["recipe"] > 100


@pytest.mark.parametrize(
    ("targets", "means"),
    [
        (None, "q_proj+v_proj"),
        (["in_proj", "q_proj", "Wqkv"], "q_proj"),
        ("all-linear", "all-linear"),
        (["o_proj", "model.layers.0.mlp.up_proj"], "o_proj+up_proj"),
        (["v_proj", "embed_tokens"], "v_proj+embed_tokens"),
        (["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], "all-linear"),
    ],
)
def test_adapted_layers(targets: list[str] | str | None, means: str, tmp_path: Path) -> None:
    keys = {} if targets is None else {"lora_target_modules": targets}
    recipe, _ = read(
        tmp_path,
        {"model_name_or_path": "tiny", "max_length": 128, "use_peft": True, "lora_r": 4, "loss_type": "nll", **keys},
    )
    assert (recipe.lora, recipe.lora_targets) == (4, means)


def test_names_without_a_layer_are_skipped_with_a_note(tmp_path: Path) -> None:
    keys = {"model_name_or_path": "tiny", "max_length": 128, "use_peft": True, "lora_r": 4}
    _, report = read(tmp_path, {**keys, "lora_target_modules": ["q_proj", "in_proj"]})
    assert "peft finds no layer of tiny named in_proj, and skips the name" in report.assumed
    for unknown in (["in_proj"], ["q_proj", "input_layernorm"]):
        with pytest.raises(UnsupportedError, match="LoRA on "):
            read(tmp_path, {**keys, "lora_target_modules": unknown})


@pytest.mark.parametrize(
    ("targets", "means"),
    [
        ("all", "all-linear"),
        ("lm_head", "lm_head"),
        ("v_proj,lm_head,embed_tokens", "v_proj+lm_head+embed_tokens"),
        (
            "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj,lm_head",
            "q_proj+k_proj+v_proj+o_proj+gate_proj+up_proj+down_proj+lm_head",
        ),
    ],
)
def test_adapters_on_the_head(targets: str, means: str, tmp_path: Path) -> None:
    keys = {"model_name_or_path": "tiny", "stage": "sft", "cutoff_len": 128, "template": "default"}
    recipe, _ = read(tmp_path, {**keys, "finetuning_type": "lora", "lora_rank": 4, "lora_target": targets})
    assert (recipe.lora, recipe.lora_targets) == (4, means)


def test_a_loss_that_would_ignore_the_heads_adapters_is_named(tmp_path: Path) -> None:
    keys = {"model_name_or_path": "tiny", "max_length": 128, "use_peft": True, "lora_target_modules": ["lm_head"]}
    with pytest.raises(RecipeError, match="--loss trl-tiled reads the head's weight"):
        read(tmp_path, keys)


def test_adapters_on_other_layers_are_named(tmp_path: Path) -> None:
    keys = {"model_name_or_path": "tiny", "max_length": 128, "use_peft": True, "lora_target_modules": ["norm"]}
    with pytest.raises(UnsupportedError, match="lora_target_modules: LoRA on norm is not supported yet"):
        read(tmp_path, keys)
