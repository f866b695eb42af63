"""What a file trains: said by its keys, else by the columns of its data set, else by nobody."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ligerprof.errors import UnsupportedError
from ligerprof.recipe.configs.report import UNNAMED_METHOD
from ligerprof.recipe.configs.resolve import load_recipe
from ligerprof.recipe.configs.sources import columns_named_in
from tests.recipe.configs.texts import read, write

# a run of TRL whose every key SFT, DPO, reward models and classification share
SHARED = {
    "model_name_or_path": "tiny",
    "dataset_name": "somebody/data",
    "per_device_train_batch_size": 2,
    "max_length": 128,
    "bf16": True,
    "output_dir": "out",
}
TRAINER = {"model_name_or_path": "tiny", "per_device_train_batch_size": 2, "max_seq_length": 128, "output_dir": "out"}
LLM2VEC = {
    **TRAINER,
    "bidirectional": True,
    "pooling_mode": "mean",
    "dataset_name": "E5",
    "dataset_file_path": "cache/echo-data",
    "stop_after_n_steps": 1000,
    "lora_r": 16,
    "torch_dtype": "bfloat16",
}
# sft.yaml for DPO, and the other way around: the name does not count
NAMES = ("dpo.yaml", "sft.yaml", "train.json")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "keys",
    [
        SHARED,
        {**SHARED, "use_peft": True, "lora_r": 16},
        TRAINER,
        # taken for files of open-instruct and of LLaMA-Factory
        {"model_name_or_path": "tiny", "per_device_train_batch_size": 2, "with_tracking": True, "use_lora": True},
        {"model_name_or_path": "tiny", "cutoff_len": 128, "lora_rank": 8, "bf16": True},
    ],
    ids=str,
)
def test_a_file_that_names_no_method_is_counted_as_sft_and_says_so(
    keys: dict[str, Any], name: str, tmp_path: Path
) -> None:
    _, report = load_recipe([write(tmp_path, name, json.dumps(keys))], {})
    assert report.method is None
    assert next(report.lines()) == UNNAMED_METHOD
    assert report.assumed[0].startswith(UNNAMED_METHOD)
    assert report.to_json()["method"] is None


@pytest.mark.parametrize(
    "keys",
    [
        {**SHARED, "packing": False},
        {**SHARED, "dataset_text_field": "text"},
        {**SHARED, "loss_type": "chunked_nll"},
        {**SHARED, "trainer_type": "sft"},
        {**SHARED, "dataset_mixture": {"datasets": [{"id": "somebody/data", "columns": ["messages"]}]}},
        {**TRAINER, "block_size": 128},
        {"base_model": "tiny", "micro_batch_size": 1, "sequence_len": 128},
        {"model_name_or_path": "tiny", "stage": "sft", "finetuning_type": "lora", "cutoff_len": 128},
        {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1},
    ],
    ids=str,
)
def test_files_of_supervised_fine_tuning(keys: dict[str, Any], tmp_path: Path) -> None:
    _, report = read(tmp_path, keys)
    assert report.method == "sft"
    assert UNNAMED_METHOD not in " ".join(report.assumed)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"lora_task_type": "SEQ_CLS"}, "lora_task_type: 'SEQ_CLS': classification"),
        ({"model_init_kwargs": {"num_labels": 1}}, "num_labels: classification"),
        ({"problem_type": "single_label_classification"}, "problem_type: classification"),
        ({"auto_model_class": "AutoModelForSequenceClassification"}, "classification"),
        ({"loss_type": "sigmoid"}, "loss_type: 'sigmoid': DPO"),
        ({"loss_type": "dapo"}, "loss_type: 'dapo': reinforcement learning"),
        ({"trainer": "trl.DPOTrainer"}, "trainer: 'trl.DPOTrainer': DPO"),
        ({"method": "ORPO"}, "DPO or another preference"),
        ({"algorithm": "grpo"}, "reinforcement learning"),
        ({"trainer_type": "PPOTrainer"}, "reinforcement learning"),
        ({"task": "reward_modeling"}, "reward modeling"),
        ({"method": "kto"}, "KTO"),
        ({"desirable_weight": 1.0}, "KTO"),
        ({"step_separator": "\n"}, "a reward model of steps"),
        ({"dataset_columns": ["prompt", "chosen", "rejected"]}, "dataset_columns has the columns chosen, rejected"),
        ({"num_generations": 8, "reward_funcs": ["length"]}, "reinforcement learning"),
        ({"sentence_pooling_method": "last", "temperature": 0.02}, "training of embeddings"),
        ({"query_max_len": 64, "passage_max_len": 256}, "training of embeddings"),
        ({"mlm_probability": 0.2, "lora_r": 16}, "training on masked tokens"),
    ],
    ids=str,
)
def test_files_whose_keys_name_another_method_are_refused_by_its_name(
    keys: dict[str, Any], says: str, name: str, tmp_path: Path
) -> None:
    file = write(tmp_path, name, json.dumps({**SHARED, **keys}))
    with pytest.raises(UnsupportedError, match="is not supported yet") as caught:
        load_recipe([file], {})
    assert says in str(caught.value)
    assert "Take the key out" not in str(caught.value)
    assert "ligerprof run -- COMMAND" in str(caught.value)


@pytest.mark.parametrize("keys", [{"support": "ppo"}, {"task": "support chat"}, {"num_labels": None}], ids=str)
def test_words_that_only_look_like_a_method(keys: dict[str, Any], tmp_path: Path) -> None:
    assert read(tmp_path, {**SHARED, **keys})[1].method is None


def test_a_file_of_llm2vec_is_not_counted_as_full_fine_tuning(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="bidirectional: training of embeddings"):
        read(tmp_path, LLM2VEC)
    # named by the user: what is counted, and that its adapter is not
    _, report = load_recipe([f"transformers={write(tmp_path, 'echo.json', LLM2VEC)}"], {})
    assert "lora_r" not in report.read
    assert "which no key of the file switches on" in report.left_out["lora_r"]


@pytest.mark.parametrize("framework", ["trl-sft", "trl-dpo", "trl-reward", "trl-rl", "trl-grpo", "trl-kto", "trl-ppo"])
@pytest.mark.parametrize("name", NAMES)
def test_the_method_can_be_named_on_the_command_line(framework: str, name: str, tmp_path: Path) -> None:
    source = f"{framework}={write(tmp_path, name, json.dumps(SHARED))}"
    if framework == "trl-sft":
        assert load_recipe([source], {})[1].method == "sft"
        return
    with pytest.raises(UnsupportedError, match=f"{framework}: .* is not supported yet"):
        load_recipe([source], {})


def rows(path: Path, row: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{json.dumps(row)}\n" * 3, encoding="utf-8")


PAIRS = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("row", "says"),
    [
        (PAIRS, "dataset_name has the columns chosen, rejected: DPO, a reward model"),
        ({"chosen": [], "rejected": [], "score_chosen": 1.0}, "DPO, a reward model"),
        ({"prompt": "a", "completion": "b", "label": True}, "KTO"),
        ({"prompt": "a", "completions": ["b"], "labels": [True]}, "a reward model of steps"),
        ({"prompt": [{"role": "user"}]}, "has the column prompt alone: reinforcement learning"),
        ({"anchor": "a", "positive": "b", "negative": "c"}, "training of embeddings"),
        ({"text": "a"}, "sft"),
        ({"messages": []}, "sft"),
        ({"prompt": "a", "completion": "b"}, "sft"),
        # of both, or of none that is known
        ({**PAIRS, "messages": []}, None),
        ({"text": "a", "label": 1}, None),
        ({"instruction": "a", "output": "b"}, None),
    ],
    ids=str,
)
def test_the_columns_of_a_local_data_set_tell_the_method(
    row: dict[str, Any], says: str | None, name: str, tmp_path: Path
) -> None:
    rows(tmp_path / "pairs" / "train.jsonl", row)
    file = write(tmp_path, name, json.dumps({**SHARED, "dataset_name": str(tmp_path / "pairs")}))
    if says in (None, "sft"):
        assert load_recipe([file], {})[1].method == says
        return
    with pytest.raises(UnsupportedError) as caught:
        load_recipe([file], {})
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "keys",
    [
        {"dataset_name": "data"},
        {"train_file": "data/train.jsonl"},
        {"datasets": [{"path": "data", "split": "train"}]},
        {"dataset_mixer": {"data": 1.0}},
        {"data": {"train": "data/train.jsonl"}},
    ],
    ids=str,
)
def test_data_sets_are_found_next_to_the_file(keys: dict[str, Any], tmp_path: Path) -> None:
    rows(tmp_path / "data" / "test.jsonl", {"text": "a"})
    rows(tmp_path / "data" / "train.jsonl", PAIRS)
    named = dict(columns_named_in(keys, str(tmp_path / "config.yaml")))
    assert named == {next(iter(keys)): frozenset(PAIRS)}


def test_formats_of_data_sets(tmp_path: Path) -> None:
    columns = frozenset({"chosen", "rejected"})
    row = dict.fromkeys(sorted(columns), "a")
    # as `save_to_disk` of datasets writes them
    for folder in ("saved", "saved-dict/train"):
        (tmp_path / folder).mkdir(parents=True)
        write(tmp_path / folder, "dataset_info.json", {"features": {name: {"dtype": "string"} for name in row}})
        (tmp_path / folder / "data-00000-of-00001.arrow").write_bytes(b"\xff\xff")
    write(tmp_path / "saved-dict", "dataset_dict.json", {"splits": ["train"]})
    write(tmp_path, "array.json", json.dumps([row, row], indent=1))
    write(tmp_path, "lines.json", json.dumps(row) + "\n")
    write(tmp_path, "table.csv", "rejected,chosen\na,b\n")
    rows(tmp_path / "mixed" / "dpo.json", row)
    rows(tmp_path / "mixed" / "sft.json", {"text": "a"})
    write(tmp_path, "broken.json", '{"chosen": ')
    write(tmp_path, "deep.json", "[" * 100_000)
    names = (
        "saved",
        "saved-dict",
        "array.json",
        "lines.json",
        "table.csv",
        "broken.json",
        "deep.json",
        "mixed",
        "nowhere",
    )
    found = {name: list(columns_named_in({"dataset_name": name}, str(tmp_path / "sft.yaml"))) for name in names}
    assert [name for name in names if found[name] == [("dataset_name", columns)]] == list(names[:5])
    assert [found[name] for name in names[5:]] == [[]] * 4


def test_tables_are_read_if_pyarrow_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.parquet").write_bytes(b"PAR1")
    keys, file = {"dataset_name": str(tmp_path)}, str(tmp_path / "sft.yaml")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert list(columns_named_in(keys, file)) == []
    schema = SimpleNamespace(names=["chosen", "rejected"])
    parquet = SimpleNamespace(read_schema=lambda _: schema)
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace(parquet=parquet, ipc=None))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)
    assert list(columns_named_in(keys, file)) == [("dataset_name", frozenset(schema.names))]
