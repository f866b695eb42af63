import json
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from ligerprof.analyzers.estimate import estimate
from ligerprof.analyzers.search.changes import LADDER
from ligerprof.cli.main import main
from ligerprof.recipe.configs.resolve import load_recipe
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.units import MIB

TERMINAL_COLUMNS = 100


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["advise", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_the_ladder_is_printed_until_it_fits() -> None:
    code, stdout, stderr = run("--gpu", "rtx4090", "--batch", "8", "--no-simulate", "--all")

    lines = stdout.splitlines()
    assert (code, stderr) == (0, "assumed: --model llama3.2-1b, since none is given\n")
    assert max(map(len, lines)) <= TERMINAL_COLUMNS
    assert lines[0].startswith("llama3.2-1b, 8 x 1024 tokens")
    assert all(any(line.lstrip().startswith(change.title) for line in lines) for change in LADDER)
    answer = lines.index("Next: ligerprof step --model llama3.2-1b --batch 8 --liger all --gpu rtx4090")
    assert answer < 20
    _, brief, _ = run("--gpu", "rtx4090", "--batch", "8", "--no-simulate")
    assert brief.splitlines()[: answer + 1] == lines[: answer + 1]
    assert brief.rstrip().endswith("do not apply; --all says why.")


def test_the_plan_is_simulated_and_its_command_reproduces_it() -> None:
    options = ["--model", "tiny", "--batch", "32", "--seq", "512", "--no-checkpointing", "--precision", "fp32"]

    code, stdout, stderr = run(*options, "--memory-limit", "300MiB", "--json")

    found = json.loads(stdout)
    assert (code, found["schema"], found["kind"], found["fits"]) == (0, 1, "advise", True)
    assert found["verdict"]["checked"] == found["plan"]["verdict"]["checked"] == "simulated"
    assert found["plan"]["verdict"]["held"] == "reserved"
    assert found["plan"]["verdict"]["held_bytes"] <= found["limit_bytes"] == 300 * MIB
    assert "simulating tiny, 32 x 512 tokens" in stderr
    saved_bytes = sum(step["saved_bytes"] for step in found["steps"] if step["state"] == "applied")
    assert found["needed_bytes"] - saved_bytes == found["plan"]["needed_bytes"]

    program, command, *flags = shlex.split(found["command"])
    assert (program, command, flags) == ("ligerprof", "step", found["plan"]["flags"])
    plan = TrainingRecipe.from_json(found["plan"]["recipe"])
    again = CliRunner().invoke(main, ["estimate", *flags, "--json"])
    # the command predicts the time, too
    assert json.loads(again.stdout).items() >= estimate(plan).to_json().items()


def test_a_recipe_that_fits_needs_no_change() -> None:
    code, stdout, _ = run("--model", "tiny", "--seq", "128", "--no-simulate")

    assert code == 0
    assert "Nothing needs to change." in stdout
    assert "Next: ligerprof step --model tiny --seq 128" in stdout.splitlines()


def test_a_recipe_that_cannot_fit_exits_3_and_prints_the_ladder() -> None:
    code, stdout, stderr = run("--model", "tiny", "--memory-limit", "1MiB", "--no-simulate")

    assert code == 3
    assert "gradient accumulation" in stdout
    assert stderr.startswith("Error: no change of the ladder makes it fit 1.0 MiB. Choose another GPU")
    assert stderr.count("\n") == 1


@pytest.mark.slow
def test_fragmentation_is_found_by_simulation() -> None:
    # the estimate is 21.68 GiB allocated; an H200 reserves 24.37 GiB
    code, stdout, _ = run("--memory-limit", "22GiB", "--json")

    found = json.loads(stdout)
    assert code == 0
    assert found["needed_bytes"] < found["limit_bytes"]
    assert (found["verdict"]["fits"], found["plan"]["verdict"]["fits"]) == (False, True)
    assert [step["name"] for step in found["steps"] if step["state"] == "applied"] == ["expandable-segments"]
    assert found["command"].endswith("--memory-limit 22GiB --alloc-conf expandable_segments:True")


def test_a_plan_that_cannot_run_here_is_estimated_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ligerprof.recipe.conflicts.find_spec", lambda package: None if package == "deepspeed" else True
    )
    monkeypatch.setattr("ligerprof.cli.advise.main_memory_bytes", lambda: 2**30)

    code, stdout, _ = run("--model", "llama3.1-8b", "--memory-limit", "40GiB", "--no-simulate", "--json")

    found = json.loads(stdout)
    assert code == 0
    assert found["plan"]["recipe"]["engine"] == "deepspeed"
    assert found["command"].startswith("ligerprof estimate ")
    assert any("needs deepspeed" in note for note in found["notes"])
    assert any("this machine has 1.00 GiB" in note or "this machine has 1024.0 MiB" in note for note in found["notes"])


@pytest.mark.slow
def test_each_of_several_files_gets_its_own_changes(tmp_path: Path) -> None:
    files = [tmp_path / "sft.yaml", tmp_path / "accelerate.yaml"]
    files[0].write_text("model_name_or_path: meta-llama/Llama-3.2-1B\ndataset_name: d\ngradient_checkpointing: false\n")
    files[1].write_text("distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 4\n")
    copies = [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    given = [word for file in files for word in ("--config", str(file))]
    written = [word for copy in copies for word in ("-o", str(copy))]
    arguments = ["advise", *given, "--memory-limit", "14GiB", "--no-simulate", "--json"]

    result = CliRunner().invoke(main, [*arguments, *written, "--sharding", "fsdp2"])

    found = json.loads(result.stdout)
    assert [edit["file"] for edit in found["edits"]] == list(map(str, files))
    assert found["edit"] == found["edits"][0]
    again, _ = load_recipe(list(map(str, copies)), {})
    assert (again.engine.value, again.gpus) == ("fsdp2", 4)
    # accelerate's groups and dtype of the reduction, so that the files need what the plan says
    plan = found["plan"]["recipe"]
    assert estimate(again).highest_peak_bytes == found["plan"]["needed_bytes"]
    assert (plan["engine"], plan["provider"]) == ("fsdp2", "liger")
    # one copy of two
    copies[0].unlink()
    result = CliRunner().invoke(main, [*arguments, *written[:2], "--sharding", "fsdp2"])
    assert f"{files[1]} changes, too" in result.stderr
    deepspeed = json.loads(CliRunner().invoke(main, arguments).stdout)
    assert deepspeed["plan"]["recipe"]["engine"] == "deepspeed"
    chosen = json.loads(CliRunner().invoke(main, [*arguments, "--provider", "ligerprof"]).stdout)
    assert chosen["plan"]["recipe"]["provider"] == "ligerprof"


def test_copies_have_names_of_their_own_and_a_file_each(tmp_path: Path) -> None:
    file, copy, other = (tmp_path / name for name in ("axolotl.yaml", "fixed.yaml", "other.yaml"))
    file.write_text("base_model: meta-llama/Llama-3.2-1B\nmicro_batch_size: 8\nsequence_len: 2048\nadapter: lora\n")
    arguments = ["advise", "--config", str(file), "--memory-limit", "8GiB", "--no-simulate", "-o", str(copy), "-o"]

    same = CliRunner().invoke(main, [*arguments, f"{tmp_path}/../{tmp_path.name}/fixed.yaml", "--force"])
    assert (same.exit_code, same.stdout, copy.exists()) == (1, "", False)
    assert "two copies under one name" in same.stderr

    result = CliRunner().invoke(main, [*arguments, str(other)])
    assert f"{other} is not written: no other file changes" in result.stderr
    assert (copy.exists(), other.exists()) == (True, False)


def test_a_file_that_cannot_be_edited_by_lines_leaves_the_advice_and_its_keys(tmp_path: Path) -> None:
    file = tmp_path / "args.yaml"
    file.write_text("  output_dir: o\n  per_device_train_batch_size: 8\n")
    arguments = [
        "advise",
        "--config",
        str(file),
        "--model",
        "tiny",
        "--memory-limit",
        "40MiB",
        "--no-simulate",
        "--json",
    ]

    result = CliRunner().invoke(main, arguments)

    found = json.loads(result.stdout)
    # the keys to set by hand
    assert "per_device_train_batch_size" in [change["key"] for change in found["edit"]["changes"]]
    copied = CliRunner().invoke(main, [*arguments, "-o", str(tmp_path / "fixed.yaml")])
    assert (copied.exit_code, "cannot be replaced" in copied.stderr) == (2, True)
