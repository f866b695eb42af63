import json
import os
from pathlib import Path
from typing import Any

import pytest

from ligerprof.errors import UnknownModelError
from ligerprof.models import load_model
from ligerprof.models.names import cache_folder, find_cached_config
from ligerprof.words import nearest_names
from tests.models.test_models import SMALL_LLAMA


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache and an empty working folder."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "hf" / "hub"


def cache(hub: Path, name: str, revision: str, config: Any = None, *, main: bool = False) -> Path:
    """Put a revision into the cache as huggingface_hub does: the files are links to blobs."""
    folder = hub / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / revision
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    snapshot.mkdir(parents=True)
    if config is not None:
        (folder / "blobs" / f"b{revision}").write_text(json.dumps(config))
        (snapshot / "config.json").symlink_to(Path("../../blobs") / f"b{revision}")
    if main:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(revision)
    return snapshot


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B"),
        ("qwen/qwen3-4b", "Qwen/Qwen3-4B"),
        ("QWEN3-4B", "qwen3-4b"),
        ("Llama3.2-1B", "llama3.2-1b"),
        ("Llama-3.2-1B", "meta-llama/Llama-3.2-1B"),
        ("meta-llama/llama-3.2-1b-instruct", "meta-llama/Llama-3.2-1B-Instruct"),
        ("UNSLOTH/Llama-3.2-1B-Instruct", "unsloth/Llama-3.2-1B-Instruct"),
        ("Llama3.3-70b", "llama3.3-70b"),
    ],
)
def test_names_work_in_any_case_and_without_the_organization(typed: str, name: str) -> None:
    spec = load_model(typed)
    assert (spec.name, spec.weights_path) == (name, None)
    assert spec.parameter_count == load_model(name).parameter_count


def test_variants_have_their_own_figures() -> None:
    assert load_model("Qwen/Qwen3-4B").max_positions == 40960
    assert load_model("Qwen/Qwen3-4B-Base").max_positions == 32768
    assert load_model("Qwen/Qwen3-4B-Instruct-2507").max_positions == 262144


def test_the_cache_decides_before_the_catalog_and_after_a_folder(hub: Path) -> None:
    cache(hub, "Qwen/Qwen3-4B", "a" * 40, {**SMALL_LLAMA, "num_hidden_layers": 3})
    assert load_model("qwen/qwen3-4b").layers == 3
    folder = Path("Qwen/Qwen3-4B")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**SMALL_LLAMA, "num_hidden_layers": 4}))
    assert load_model("Qwen/Qwen3-4B").layers == 4
    # a short name is the catalog's, whatever the folder holds
    Path("tiny").mkdir()
    assert load_model("tiny").layers == 2


def test_a_cached_model_is_found_by_its_id_in_any_case(hub: Path) -> None:
    cache(hub, "acme/Small--Model", "a" * 40, SMALL_LLAMA)
    cache(hub, "acme/Small-Model", "a" * 40, SMALL_LLAMA)
    cache(hub, "one-word", "a" * 40, SMALL_LLAMA)
    assert load_model("ACME/small-model").name == "acme/Small-Model"
    assert load_model("one-word").name == "one-word"


def test_the_main_branch_decides_then_the_newest_revision_with_a_config(hub: Path) -> None:
    revisions = {
        each: cache(hub, "acme/small", each * 40, {**SMALL_LLAMA, "num_hidden_layers": layers})
        for layers, each in enumerate("abc", start=3)
    }
    for age, each in enumerate("bca"):
        os.utime(revisions[each], (1000 - age, 1000 - age))
    cache(hub, "acme/small", "d" * 40)
    assert load_model("acme/small").layers == 4
    (revisions["b"] / "config.json").unlink()
    assert load_model("acme/small").layers == 5
    cache(hub, "acme/small", "e" * 40, {**SMALL_LLAMA, "num_hidden_layers": 9}, main=True)
    assert load_model("acme/small").layers == 9


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({}, "~/.cache/huggingface/hub"),
    ],
)
def test_the_cache_is_where_huggingface_hub_looks(environment: dict[str, str], folder: str) -> None:
    assert cache_folder(environment) == Path(folder).expanduser()


@pytest.mark.parametrize("name", ["../secret", "a/../../secret", "a/b/c", "a b", "acme--small", "", "/", "\x1b[2J"])
def test_what_is_not_a_hub_id_is_not_looked_up(hub: Path, name: str) -> None:
    (hub.parent / "secret").mkdir(parents=True)
    assert find_cached_config(name) is None


def test_damaged_caches_are_no_surprise(hub: Path) -> None:
    broken = cache(hub, "acme/broken", "a" * 40)
    (broken / "config.json").write_text("{")
    with pytest.raises(UnknownModelError, match="not readable as JSON"):
        load_model("acme/broken")
    snapshot = cache(hub, "acme/dangling", "a" * 40)
    (snapshot / "config.json").symlink_to("nowhere")
    folder = hub / "models--acme--strange"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_bytes(b"../../../secret\xff")
    for name in ("acme/dangling", "acme/strange"):
        with pytest.raises(UnknownModelError, match="unknown model"):
            load_model(name)


def test_architectures_without_a_row_are_refused_by_name(hub: Path) -> None:
    cache(hub, "acme/experts", "a" * 40, {**SMALL_LLAMA, "model_type": "mamba9"})
    with pytest.raises(UnknownModelError, match=r"^acme/experts: model_type 'mamba9' is not supported; docs/models.md"):
        load_model("acme/experts")
    with pytest.raises(UnknownModelError, match=r"^bigscience/bloom-3b: model_type 'bloom' is not supported"):
        load_model("bigscience/Bloom-3B")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("meta-lama/Llama-3.2-1B", "Did you mean meta-llama/Llama-3.2-1B or"),
        ("qwn3-4b", "Did you mean qwen3-4b or"),
        ("Qwen/Qwen3-4", "Did you mean Qwen/Qwen3-4B or"),
        ("llama3.2-2b", r"Did you mean llama3\.2-1b or llama3\.2-3b"),
        ("acme/smal", "Did you mean acme/small"),
    ],
)
def test_an_unknown_name_gets_the_nearest_ones(hub: Path, typed: str, meant: str) -> None:
    cache(hub, "acme/small", "a" * 40, SMALL_LLAMA)
    with pytest.raises(UnknownModelError, match=meant) as caught:
        load_model(typed)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["zzz" * 5000, "null\0"], ids=["long", "null"])
def test_a_name_unlike_any_other_gets_no_suggestion(name: str) -> None:
    with pytest.raises(
        UnknownModelError, match=r"`ligerprof models`\. For a fine-tune add .* --like llama3\.1-8b\."
    ) as caught:
        load_model(name)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "name", ["TechxGenus/Meta-Llama-3-8B-Instruct-GPTQ", "x/Qwen3-4B-AWQ", "y/Llama-2-7b-AQLM-2Bit"]
)
def test_checkpoints_of_other_quantizations_are_named(name: str) -> None:
    with pytest.raises(UnknownModelError, match=r"has quantized weights \((GPTQ|AWQ|AQLM)\), which are not covered"):
        load_model(name)


@pytest.mark.parametrize("name", ["x/Qwen3-4B-AWQ", "x/y-GPTQ-Int4", "x/y-4bit", "x/y-int8", "x/y.8-bit"])
def test_quantized_checkpoints_are_no_fine_tunes_of_the_model_that_they_are_like(name: str) -> None:
    with pytest.raises(UnknownModelError, match="has quantized weights"):
        load_model(name, "llama3.1-8b")


def test_a_cached_config_of_quantized_weights_is_refused(hub: Path) -> None:
    cache(hub, "x/packed", "1", {**SMALL_LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 4}})
    with pytest.raises(UnknownModelError, match=r"quantized weights \(GPTQ\)"):
        load_model("x/packed")
    cache(hub, "x/loaded", "1", {**SMALL_LLAMA, "quantization_config": {"quant_method": "bitsandbytes"}})
    assert load_model("x/loaded").name == "x/loaded"


def test_a_known_model_stands_in_for_an_unknown_name_only(hub: Path) -> None:
    spec, known = load_model("org/my-sft", "llama3.2-1b"), load_model("llama3.2-1b")
    assert (spec.name, spec.like, spec.parameters) == ("org/my-sft", "llama3.2-1b", known.parameters)
    assert load_model("qwen3-4b", "llama3.2-1b") == load_model("qwen3-4b")
    cache(hub, "org/my-sft", "1", SMALL_LLAMA)
    assert (load_model("org/my-sft", "llama3.2-1b").like, load_model("org/my-sft").hidden_size) == (
        None,
        SMALL_LLAMA["hidden_size"],
    )
    with pytest.raises(UnknownModelError, match=r"--like: unknown model 'lama'"):
        load_model("org/other", "lama")
    with pytest.raises(UnknownModelError, match="vision tower"):
        load_model("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2.5-7b")


@pytest.mark.parametrize("folder", ["/data/models", "models/hub", "C"])
def test_a_path_of_another_machine_gets_the_published_model_of_its_name(folder: str) -> None:
    with pytest.raises(UnknownModelError, match=r"as in --like Qwen/Qwen2\.5-7B-Instruct\."):
        load_model(f"{folder}/Qwen2.5-7B-Instruct")


def test_packed_repositories_name_the_model_and_the_option() -> None:
    with pytest.raises(UnknownModelError, match=r"4-bit weights of unsloth/Llama-3\.2-1B-Instruct.*--qlora R"):
        load_model("unsloth/Llama-3.2-1B-Instruct-bnb-4bit")


def test_nearest_names_compare_last_parts_too() -> None:
    known = ("org/model-7b", "other/thing", "model-70b")
    assert nearest_names("MODEL-7B", known)[0] == "org/model-7b"
    assert nearest_names("elsewhere/model-7b", known)[0] == "org/model-7b"
    assert nearest_names("unlike", known) == ()
