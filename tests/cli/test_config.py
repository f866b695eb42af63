"""`--config` on the command line: what the files set, what wins, and what is printed where."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ligerprof.cli.main import COMMANDS, main
from ligerprof.recipe.configs.resolve import load_recipe
from ligerprof.recipe.configs.settings import SIMULATED_RANKS
from ligerprof.recipe.flags import recipe_flags
from ligerprof.recipe.training import TrainingRecipe

ARGUMENTS = {
    "model_name_or_path": "tiny",
    "per_device_train_batch_size": 2,
    "max_seq_length": 128,
    "bf16": True,
    "dtype": "float32",
    "learning_rate": 1e-5,
    "ddp_bucket_cap_mb": 50,
    "frobnicate": 1,
    "output_dir": "out",
}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.fixture
def arguments_file(tmp_path: Path) -> str:
    path = tmp_path / "args.json"
    path.write_text(json.dumps(ARGUMENTS), encoding="utf-8")
    return str(path)


def estimated(*arguments: str) -> dict[str, Any]:
    done = run("estimate", "--json", *arguments)
    assert done.exit_code == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_a_file_and_the_same_options_give_the_same_estimate(arguments_file: str) -> None:
    typed = "--model tiny --batch 2 --seq 128 --precision amp --no-checkpointing --optimizer adamw-fused --clip 1"
    plain, read = estimated(*typed.split()), estimated("--config", arguments_file)
    assert read["peak_bytes"] == plain["peak_bytes"]
    assert "config" not in plain
    assert read["config"]["files"] == [{"file": arguments_file, "framework": "transformers"}]
    assert read["config"]["read"]["bf16"] == "autocast bf16"
    assert read["config"]["ignored"] == ["learning_rate", "output_dir"]
    assert read["config"]["unknown"] == ["frobnicate"]
    assert "buckets and options of DDP (ddp_bucket_cap_mb)" in read["left_out"]


def test_options_on_the_line_win_even_at_their_defaults(arguments_file: str) -> None:
    # 4 is the default of --batch
    given = estimated("--config", arguments_file, "--batch", "4", "--checkpointing")
    typed = "--model tiny --batch 4 --seq 128 --precision amp --optimizer adamw-fused --clip 1"
    assert given["peak_bytes"] == estimated(*typed.split())["peak_bytes"]


def test_the_report_goes_to_stderr(arguments_file: str) -> None:
    done = run("estimate", "--config", arguments_file)
    lines = done.stderr.splitlines()
    assert lines[:4] == [
        "counted as SFT; the file names no method",
        f"read {arguments_file} as transformers",
        "5 keys read, 2 without effect on memory, 1 unknown",
        "unknown keys: frobnicate",
    ]
    assert [line.partition(":")[0] for line in lines[4:]] == ["assumed"] * 4 + ["left out"]
    assert lines[-1] == "left out: buckets and options of DDP (ddp_bucket_cap_mb)"
    assert "frobnicate" not in done.stdout


@pytest.mark.parametrize("model", ["tiny", "gpt2-xl"])
def test_a_recipe_of_ours_reads_back(model: str, tmp_path: Path) -> None:
    recipes = [
        TrainingRecipe(
            model=model, seq=256, batch=3, liger="rms" if model == "tiny" else "none", memory_limit_bytes=2**34
        ),
        TrainingRecipe(model=model, seq=256, precision="bf16", lora=4 if model == "tiny" else None, reentrant=True),
        TrainingRecipe(
            model=model, seq=64, precision="fp32", optimizer="sgd", clip=0.5, checkpointing=False, gpu="l40s"
        ),
        TrainingRecipe(model=model, seq=64, engine="deepspeed", precision="mixed-fp16", zero=3, offload="all", gpus=4),
        TrainingRecipe(
            model=model,
            seq=64,
            engine="deepspeed",
            precision="mixed",
            zero=2,
            deepspeed_config={"zero_optimization": {"reduce_bucket_size": 1000}},
        ),
        TrainingRecipe(model=model, seq=64, engine="ddp", gpus=2, grad_accum=2, grad_sync="every"),
        TrainingRecipe(model=model, seq=64, engine="fsdp2", gpus=2, precision="amp", reshard=False),
        TrainingRecipe(
            model=model,
            seq=64,
            engine="fsdp2",
            gpus=4,
            precision="mixed",
            replicate=2,
            wrap="accelerate",
            reduce_dtype="bfloat16",
            offload="all",
        ),
    ]
    for number, recipe in enumerate(recipes):
        path = tmp_path / f"{number}.json"
        document = {"schema": 1, "kind": "step", "recipe": recipe.to_json()} if number % 2 else recipe.to_json()
        path.write_text(json.dumps(document), encoding="utf-8")
        again, report = load_recipe([str(path)], {})
        assert again.to_json() == recipe.to_json()
        # GPUs, weights and sequences
        assert len(report.assumed) == 3


def test_a_run_directory_is_its_recipe(tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text(json.dumps(TrainingRecipe(model="tiny", seq=32).to_json()), encoding="utf-8")
    assert estimated("--config", str(tmp_path))["config"]["files"][0]["framework"] == "ligerprof"


def test_a_sweep_varies_what_is_typed_and_takes_the_rest_from_files(arguments_file: str, tmp_path: Path) -> None:
    done = run("sweep", "--config", arguments_file, "--batch", "1,3", "--dry-run", "--json", "-o", str(tmp_path / "s"))
    assert done.exit_code == 0, done.stderr
    recipes = [cell["recipe"] for cell in json.loads(done.stdout)["cells"]]
    assert [(recipe["batch"], recipe["seq"], recipe["precision"]) for recipe in recipes] == [
        (1, 128, "amp"),
        (3, 128, "amp"),
    ]
    assert run("sweep", "--config", arguments_file, "--model", "tiny,gpt2-xl", "--dry-run").exit_code == 2


@pytest.mark.parametrize(
    ("content", "exit_code", "says"),
    [
        ({**ARGUMENTS, "neftune_noise_alpha": 5}, 1, "neftune_noise_alpha: 5: NEFTune"),
        ({**ARGUMENTS, "per_device_train_batch_size": -1}, 2, "not a whole number"),
        ({**ARGUMENTS, "model_name_or_path": "nobody/nothing"}, 2, "model_name_or_path: unknown model"),
        ({"a": 1, "b": 2}, 2, "its first keys: a, b"),
        ({}, 2, "holds no keys"),
        ({"\x1b[31m": 1, "output_dir": "x", "model_name_or_path": "tiny"}, 0, "\\x1b[31m"),
        ({"output_dir": "x"}, 2, "names no model that ligerprof reads. Give it with --model."),
    ],
    ids=str,
)
def test_errors_are_one_line(content: dict[str, Any], exit_code: int, says: str, tmp_path: Path) -> None:
    path = tmp_path / "args.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    done = run("estimate", "--config", str(path), "--seq", "32")
    assert done.exit_code == exit_code
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stderr
    if exit_code:
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["step", "estimate", "fit", "advise", "sweep"])
def test_every_command_that_takes_a_recipe_has_the_option(command: str) -> None:
    assert command in COMMANDS
    assert "--config FILE" in run(command, "--help").stdout


def test_advise_prints_and_writes_the_changes_of_the_file(arguments_file: str, tmp_path: Path) -> None:
    fixed = tmp_path / "fixed.json"
    options = ("--config", arguments_file, "--batch", "64", "--memory-limit", "80MiB", "--no-simulate")
    done = run("advise", *options, "-o", str(fixed))
    assert done.exit_code in (0, 3), done.stderr
    assert f"In {arguments_file}:" in done.stdout
    assert f"wrote {fixed}" in done.stderr
    assert run("advise", *options, "-o", str(fixed)).exit_code == 1
    found = json.loads(run("advise", *options, "--json").stdout)
    plan = found["plan"]["recipe"]
    assert plan["batch"] < 64
    for change in found["edit"]["changes"]:
        assert f"+ {change['key']}: {json.dumps(change['new'])}" in done.stdout
        assert change["old"] == ARGUMENTS.get(change["key"])
    # the next command reads the copy, which says the whole plan
    command = json.loads(run("advise", *options, "-o", str(fixed), "--force", "--json").stdout)["command"]
    assert command.startswith(f"ligerprof step --config {fixed} --memory-limit")
    again = json.loads(run("estimate", *shlex.split(command)[2:], "--json").stdout)
    assert (again["recipe"]["batch"], again["peak_bytes"]) == (plan["batch"], found["plan"]["needed_bytes"])
    changed = {change["key"]: change["new"] for change in found["edit"]["changes"]}
    assert changed["per_device_train_batch_size"] == plan["batch"]
    assert json.loads(fixed.read_text(encoding="utf-8")) == {**ARGUMENTS, **changed}


def test_a_changed_copy_needs_a_file_to_change(tmp_path: Path) -> None:
    done = run("advise", "--model", "tiny", "--seq", "64", "--no-simulate", "-o", str(tmp_path / "fixed.yaml"))
    assert done.exit_code == 1
    assert "--config" in done.stderr
    assert not (tmp_path / "fixed.yaml").exists()


# a run of TRL's DPO with default settings: no key says so
DPO = {
    "model_name_or_path": "tiny",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 2,
    "max_length": 256,
    "use_peft": True,
    "lora_r": 16,
    "lora_target_modules": "all-linear",
    "dtype": "bfloat16",
    "bf16": True,
    "gradient_checkpointing": True,
    "output_dir": "out",
}


@pytest.mark.parametrize("name", ["dpo.lora.yaml", "sft.lora.yaml"])
@pytest.mark.parametrize("limit", ["1GiB", "1MiB"])
def test_a_file_that_names_no_method_gets_no_verdict(name: str, limit: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(json.dumps({**DPO, "dataset_name": "somebody/pairs"}), encoding="utf-8")
    arguments = ("--config", str(path), "--memory-limit", limit, "--host-memory", limit)
    done = run("estimate", *arguments)
    assert (done.exit_code, done.stdout.splitlines()[0]) == (0, "counted as SFT; the file names no method")
    assert " FIT " not in done.stdout.upper().replace(".", " ")
    result = estimated(*arguments)
    assert (result["fits"], result.get("verdict"), result["limit_bytes"]) == (None, None, None)
    assert result["config"]["method"] is None
    # what the figures count is in the text and in the JSON
    for sentence in ("1 GPU counted", "weights in bfloat16: ", "every sequence is taken as full: 256 tokens"):
        assert sentence in " ".join(done.stdout.split())
        assert any(text.startswith(sentence) for text in result["assumed"])
    # named, it is judged
    named = run("estimate", "--config", f"trl-sft={path}", "--memory-limit", limit)
    assert named.exit_code == (0 if limit == "1GiB" else 3)
    assert not named.stdout.startswith("counted as SFT")


@pytest.mark.parametrize("name", ["dpo.lora.yaml", "sft.lora.yaml"])
def test_a_file_of_another_method_is_refused_by_its_data(name: str, tmp_path: Path) -> None:
    (tmp_path / "pairs").mkdir()
    (tmp_path / "pairs" / "train.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}', encoding="utf-8")
    path = tmp_path / name
    path.write_text(json.dumps({**DPO, "dataset_name": str(tmp_path / "pairs")}), encoding="utf-8")
    done = run("estimate", "--config", str(path))
    assert (done.exit_code, done.stdout) == (1, "")
    assert "dataset_name has the columns chosen, rejected: DPO" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_search_for_a_file_that_names_no_method_says_so(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(json.dumps({**DPO, "dataset_name": "somebody/pairs"}), encoding="utf-8")
    arguments = ("--config", str(path), "--memory-limit", "100MiB", "--no-simulate")
    printed = {command: run(command, *arguments).stdout for command in ("advise", "fit")}
    for text in printed.values():
        assert text.startswith("counted as SFT; the file names no method")
    result = json.loads(run("advise", *arguments, "--json").stdout)
    assert (result["fits"], result["verdict"]) == (None, None)
    searched = run("fit", *arguments, "--json")
    wanted = json.loads(searched.stdout)["wanted"]
    assert (searched.exit_code, wanted["fits"], wanted["verdict"]) == (0, None, None)
    assert "tokens has no verdict; counted as SFT" in printed["fit"]


AXOLOTL = {
    "base_model": "llama3.2-1b",
    "micro_batch_size": 1,
    "sequence_len": 512,
    "gradient_accumulation_steps": 1,
    "bf16": True,
    "deepspeed": "deepspeed_configs/zero3_bf16.json",
}


@pytest.mark.parametrize("command", ["estimate", "fit", "advise"])
@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"adapter": "qlora", "load_in_4bit": True}, "Here --qlora is {}: load_in_4bit, --engine is "),
        ({"optimizer": "paged_adamw_8bit"}, "Here --optimizer is {}: optimizer, --engine is "),
        (
            {"adapter": "lora", "lora_modules_to_save": ["embed_tokens"]},
            "Here --modules-to-save is {}: lora_modules_to",
        ),
    ],
)
def test_conflicts_name_the_file_and_the_key_of_options_that_nobody_typed(
    keys: dict[str, Any], says: str, command: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({**AXOLOTL, **keys}))
    arguments = ["--config", str(path), "--memory-limit", "24GiB"]
    arguments += ["--no-simulate"] if command != "estimate" else []
    done = run(command, *arguments)
    assert done.exit_code != 0
    error = done.stderr.splitlines()[-1]
    assert says.format(path) in error
    assert error.startswith("Error: ")
    # the framework itself may take both
    assert error.endswith(SIMULATED_RANKS)
    # what is typed needs no place
    typed = run(command, *arguments, "--engine", "deepspeed")
    assert "--engine is" not in typed.stderr


def test_a_known_model_stands_in_for_the_unknown_one_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({**ARGUMENTS, "model_name_or_path": "org/my-sft"}))
    done = run("estimate", "--config", str(path))
    assert (done.exit_code, "--like llama3.1-8b" in done.stderr) == (2, True)
    found = estimated("--config", str(path), "--like", "tiny")
    plain = estimated("--config", str(path), "--model", "tiny")
    assert found["peak_bytes"] == plain["peak_bytes"]
    assert "org/my-sft is unknown: the architecture and sizes of tiny" in found["assumed"]
    shown = run("estimate", "--config", str(path), "--like", "tiny")
    assert "\norg/my-sft (sizes of tiny), 2 x 128 tokens" in shown.stdout
    known = run("estimate", "--model", "tiny", "--like", "llama3.2-1b")
    assert "--like llama3.2-1b is not used: the sizes of tiny are known" in known.stderr
    assert known.stdout.startswith("tiny, ")


def test_a_recipe_with_a_model_that_stands_in_reads_back_and_is_typed_again() -> None:
    recipe = TrainingRecipe(model="org/my-sft", like="tiny", batch=2)
    again = TrainingRecipe.from_json(recipe.to_json())
    assert (again.spec.like, again.like, again.summary) == ("tiny", "tiny", recipe.summary)
    assert recipe_flags(recipe) == ("--model", "org/my-sft", "--like", "tiny", "--batch", "2")
    assert TrainingRecipe(model="tiny", like="llama3.2-1b") == TrainingRecipe(model="tiny")
