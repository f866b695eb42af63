"""Changed commands: values in place, files copied with their comments, and what is added where."""

import json
from pathlib import Path

import pytest

from ligerprof.errors import RecipeError
from ligerprof.recipe.commands.changes import Change, TrainingCommand, find_batches, find_levers


def changed(text: str, copies: dict[str, str] | None = None, **keys: object) -> str:
    command = TrainingCommand.read(text.split())
    paths = {Path(file): Path(copy) for file, copy in (copies or {}).items()}
    return command.changed(Change(keys=keys), paths, in_files=bool(copies)).text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("python a.py --batch 4 --lr 1", "python a.py --batch 9 --lr 1"),
        ("python a.py --batch=4", "python a.py --batch=9"),
        ("python -u a.py --lr 1", "python -u a.py --lr 1 --batch 9"),
        # the last of two counts
        ("python a.py --batch 1 --batch 4", "python a.py --batch 1 --batch 9"),
        ("X=1 torchrun --nproc_per_node 2 a.py --batch 4", "X=1 torchrun --nproc_per_node 2 a.py --batch 9"),
        # an argument of the launcher is not one of the program
        ("accelerate launch --batch 1 a.py --batch 4", "accelerate launch --batch 1 a.py --batch 9"),
        ("python a.py batch=4", "python a.py batch=9"),
    ],
)
def test_arguments_change_in_place(before: str, after: str) -> None:
    assert changed(before, batch=9) == after


def test_switches_have_values_where_the_parser_takes_them() -> None:
    assert changed("python a.py --fast", fast=False) == "python a.py"
    assert changed("python a.py", fast=True) == "python a.py --fast"
    theirs = "python a.py --output_dir o --per_device_train_batch_size 4"
    assert changed(theirs, fast=True) == f"{theirs} --fast true"


def test_values_of_trl_become_arguments_unless_a_copy_is_wanted(tmp_path: Path) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text("per_device_train_batch_size: 4  # per GPU\noutput_dir: o\ndataset_name: d\n")
    typed = f"trl sft --config {file}"
    assert changed(typed, per_device_train_batch_size=2) == f"{typed} --per_device_train_batch_size 2"
    command = TrainingCommand.read(typed.split())
    copy = tmp_path / "other.yaml"
    found = command.changed(Change(keys={"per_device_train_batch_size": 2}), {file: copy}, in_files=True)
    assert found.text == f"trl sft --config {copy}"
    assert found.files == {copy: "per_device_train_batch_size: 2  # per GPU\noutput_dir: o\ndataset_name: d\n"}


def test_other_files_are_copied(tmp_path: Path) -> None:
    file, copy = tmp_path / "a.yaml", tmp_path / "b.yaml"
    file.write_text(
        "base_model: m\nmicro_batch_size: 4\ngradient_accumulation_steps: 2\nsequence_len: 64\ndatasets: []\n"
    )
    command = TrainingCommand.read(["axolotl", "train", str(file)])
    batches = find_batches(command)
    assert (batches.key, batches.batch, batches.accumulation, batches.smaller) == (
        "micro_batch_size",
        4,
        2,
        (1, 2, 4, 8),
    )
    found = command.changed(batches.change(8), {file: copy})
    assert found.words == ("axolotl", "train", str(copy))
    assert found.files[copy].splitlines()[1:3] == ["micro_batch_size: 8", "gradient_accumulation_steps: 1"]


@pytest.mark.parametrize("named", ["--config ./a.yaml", "--config=a.yaml", "./a.yaml"])
def test_a_file_is_named_in_any_way(named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("batch: 4\n")
    found = TrainingCommand.read(["python", "a.py", *named.split()]).changed(
        Change(keys={"batch": 2}), {Path("a.yaml"): Path("/x/b.yaml")}
    )
    assert found.text == f"python a.py {named.replace('./', '').replace('a.yaml', '/x/b.yaml')}"
    assert found.files == {Path("/x/b.yaml"): "batch: 2\n"}


def test_files_without_a_key_may_be_data(tmp_path: Path) -> None:
    data = tmp_path / "data.json"
    data.write_text("[1, 2]")
    assert TrainingCommand.read(["python", "a.py", str(data), "out.json", "--batch", "4"]).files == ()
    with pytest.raises(RecipeError, match="holds no keys"):
        _ = TrainingCommand.read(["python", "a.py", "--config", str(data)]).files


def test_deepspeeds_file_agrees_with_the_trainer(tmp_path: Path) -> None:
    file, copy = tmp_path / "ds.json", tmp_path / "copy.json"
    file.write_text(
        '{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto", "fp16": {"enabled": true}}'
    )

    def found(text: str) -> tuple[str, dict[str, object]]:
        command = TrainingCommand.read(text.split())
        changed = command.changed(find_batches(command).change(2), {file: copy})
        return changed.text, json.loads(changed.files[copy])

    own, values = found(f"deepspeed a.py --deepspeed_config {file}")
    assert (own, values["train_micro_batch_size_per_gpu"]) == (f"deepspeed a.py --deepspeed_config {copy}", 2)
    theirs, values = found(f"deepspeed a.py --deepspeed {file} --output_dir o --per_device_train_batch_size 4")
    expected = "--output_dir o --per_device_train_batch_size 2 --gradient_accumulation_steps 2"
    assert theirs == f"deepspeed a.py --deepspeed {copy} {expected}"
    assert (values["train_micro_batch_size_per_gpu"], values["gradient_accumulation_steps"]) == (2, "auto")


@pytest.mark.parametrize(
    ("text", "key", "batch", "accumulation_key"),
    [
        ("trl dpo --model_name_or_path m", "per_device_train_batch_size", 8, "gradient_accumulation_steps"),
        ("python a.py --train_batch_size 6", "train_batch_size", 6, None),
        ("python a.py --micro-batch-size 6 --grad-accum 2", "micro_batch_size", 6, "grad_accum"),
    ],
)
def test_batches_are_found(text: str, key: str, batch: int, accumulation_key: str | None) -> None:
    found = find_batches(TrainingCommand.read(text.split()))
    assert (found.key, found.batch, found.accumulation_key) == (key, batch, accumulation_key)


def test_a_command_without_a_batch_names_what_was_looked_for() -> None:
    with pytest.raises(RecipeError, match=r"a\.py: no argument or key .* micro_batch_size, .*--vary"):
        find_batches(TrainingCommand.read(["python", "a.py", "--rows", "3"]))
    with pytest.raises(RecipeError, match="not a number of at least 1"):
        find_batches(TrainingCommand.read(["python", "a.py", "--batch", "many"]))


def test_levers_follow_what_the_command_says() -> None:
    def names(text: str) -> list[str]:
        return [lever.name for lever in find_levers(TrainingCommand.read(text.split()))]

    reference = "log-probabilities of the reference model computed first"
    assert reference in names("trl dpo --model_name_or_path m")
    assert reference not in names("trl dpo --model_name_or_path m --precompute_ref_log_probs true")
    assert reference not in names("trl sft --model_name_or_path m")
    # TRL checkpoints by default
    assert "activation checkpointing" not in names("trl sft --model_name_or_path m")
    assert "activation checkpointing" in names("trl sft --model_name_or_path m --gradient_checkpointing false")
    assert "8 completions generated at a time" in names(
        "trl grpo --model_name_or_path m --per_device_train_batch_size 8 --gradient_accumulation_steps 4"
    )
    # a program of one's own has no keys but its batch
    assert names("python a.py --batch 4") == ["expandable segments", "micro-batches of 2", "micro-batches of 1"]
    # and its length
    assert "seq_len of 512" in names("python a.py --batch 1 --seq-len 1024")


@pytest.mark.parametrize("words", [["run.sh"], ["X=1"], ["bash", "run.sh"], ["python a.py 'x"]])
def test_commands_that_cannot_be_changed(words: list[str]) -> None:
    with pytest.raises(RecipeError):
        TrainingCommand.read(words)
