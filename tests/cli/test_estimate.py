import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ligerprof.analyzers.estimate import estimate
from ligerprof.analyzers.step_time.account import time_or_reason
from ligerprof.analyzers.step_time.rates import time_json
from ligerprof.cli.main import main
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Role
from tests.golden import assert_matches_golden

GOLDEN = Path(__file__).parent / "golden"


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["estimate", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_json_is_what_the_library_returns() -> None:
    code, stdout, stderr = run("--json", "--precision", "bf16", "--liger", "flce", "--batch", "2")

    assert (code, stderr) == (0, "")
    recipe = TrainingRecipe(precision="bf16", liger="flce", batch=2)
    assert json.loads(stdout) == {**estimate(recipe).to_json(), **time_json(time_or_reason(recipe))}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("estimate_default", []),
        ("estimate_lora_flce", ["--model", "llama3-8b", "--lora", "16", "--liger", "flce", "--precision", "bf16"]),
        ("estimate_limit", ["--memory-limit", "24GiB", "--gpu", "rtx4090", "--loss", "hf-4.45"]),
    ],
)
def test_printed_estimate_is_the_golden_one(name: str, arguments: list[str]) -> None:
    code, stdout, _ = run(*arguments)

    assert code == (3 if name == "estimate_limit" else 0)
    assert max(map(len, stdout.splitlines())) <= 100
    assert_matches_golden(stdout, GOLDEN / f"{name}.txt")


@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["text", "json"])
def test_over_the_limit_still_prints_and_ends_in_3(as_json: list[str]) -> None:
    code, stdout, stderr = run("--model", "llama3.2-1b", "--memory-limit", "20GiB", *as_json)

    assert code == 3
    assert "peak" in stdout
    assert stderr == "Error: the estimate of 21.68 GiB is more than 20.00 GiB (--memory-limit).\n"


def test_within_the_limit_ends_in_0() -> None:
    code, stdout, _ = run("--memory-limit", "25GiB")

    assert code == 0
    assert "It fits in 25.00 GiB (--memory-limit): 21.68 GiB allocated, 24.3" in " ".join(stdout.split())


def test_fragmentation_is_judged_too() -> None:
    code, stdout, stderr = run("--memory-limit", "21.75GiB", "--json")
    verdict = json.loads(stdout)

    assert code == 3
    assert (verdict["fits"], verdict["verdict"], verdict["allocated_fits"]) == (False, "does not fit", True)
    assert verdict["peak_bytes"] < verdict["limit_bytes"] < verdict["reserved_bytes"]
    assert stderr.startswith("Error: the estimate of 24.")
    assert run("--memory-limit", "22.2GiB", "--alloc-conf", "expandable_segments:True")[0] == 0


def test_a_gpu_that_is_given_is_a_limit() -> None:
    code, stdout, _ = run("--gpu", "RTX 3060", "--json")
    assert code == 3
    assert json.loads(stdout)["limit_source"] == "NVIDIA GeForce RTX 3060 less the CUDA context"
    # the lower of both limits
    limits = [json.loads(run("--gpu", "4090", "--memory-limit", limit, "--json")[1]) for limit in ("20GiB", "24GiB")]
    assert [limit["limit_source"] for limit in limits] == [
        "--memory-limit",
        "NVIDIA GeForce RTX 4090 less the CUDA context",
    ]
    code, stdout, _ = run("--json")
    assert code == 0
    assert [json.loads(stdout)[key] for key in ("fits", "verdict", "limit_bytes")] == [None] * 3


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--model", "nonesuch"], 2, "unknown model 'nonesuch'"),
        (["--seq", "131073"], 2, "--seq 131073: llama3.2-1b has 131072 positions. Choose fewer tokens"),
        (["--liger", "flce", "--loss", "hf-4.45"], 2, "replace the same loss"),
        (["--qlora", "8", "--model", "gpt2-xl"], 2, "gpt2-xl has none"),
        (
            ["--model", "llama3.2-1b", "--liger", "swiglu", "--provider", "unknown"],
            2,
            "provider 'unknown' has no kernel 'swiglu'",
        ),
    ],
)
def test_errors_are_one_line(arguments: list[str], code: int, text: str) -> None:
    ended, stdout, stderr = run(*arguments)

    assert (ended, stdout) == (code, "")
    assert text in stderr
    assert stderr.count("\n") == 1


def test_the_whole_process_is_free_of_torch() -> None:
    code = (
        "import sys\n"
        "from ligerprof.cli.main import main\n"
        "main(['estimate', '--liger', 'all'], standalone_mode=False)\n"
        "heavy = {'torch', 'triton', 'transformers', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_simulate_settles_what_the_estimate_leaves_open() -> None:
    arguments = ("--model", "tiny", "--seq", "64", "--precision", "bf16", "--json", "--memory-limit")
    reserved_bytes = json.loads(run(*arguments, "1GiB")[1])["reserved_bytes"]
    assert json.loads(run(*arguments, str(reserved_bytes))[1])["verdict"] == "may not fit"
    code, stdout, _ = run(*arguments, str(reserved_bytes), "--simulate")
    assert (code, json.loads(stdout)["verdict"]) in ((0, "fits"), (3, "does not fit"))


def test_simulate_adds_the_simulated_step() -> None:
    arguments = ("--simulate", "--model", "tiny", "--seq", "64", "--precision", "bf16")
    code, stdout, _ = run(*arguments, "--json")

    assert code == 0
    values = json.loads(stdout)
    simulated = values["simulated"]
    assert sum(simulated["roles"].values()) == simulated["peak_bytes"]
    assert set(simulated["roles"]) == {role.value for role in Role}
    assert values["error_ratio"] == values["peak_bytes"] / simulated["peak_bytes"] - 1
    assert abs(values["error_ratio"]) < 0.01

    code, stdout, _ = run(*arguments)
    assert code == 0
    assert "estimated, MiB" in stdout
    assert "simulated, MiB" in stdout


def test_main_memory_is_judged_for_all_gpus_together() -> None:
    offload = ["--engine", "deepspeed", "--precision", "mixed", "--zero", "3", "--offload", "all", "--gpus", "2"]
    words = ["estimate", "--model", "tiny", "--seq", "128", *offload]
    free = json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)
    assert (free["fits"], free["host_limit_bytes"]) == (None, None)
    needed_bytes = 2 * free["host_bytes"]

    enough = CliRunner().invoke(main, [*words, "--json", "--host-memory", f"{needed_bytes}B"])
    short = CliRunner().invoke(main, [*words, "--host-memory", f"{needed_bytes - 1}B"])
    fit = CliRunner().invoke(
        main, ["fit", *words[1:], "--no-simulate", "--gpu", "h200", "--host-memory", f"{needed_bytes - 1}B"]
    )

    assert (enough.exit_code, json.loads(enough.stdout)["fits"]) == (0, True)
    assert (short.exit_code, fit.exit_code) == (3, 3)
    assert "over --host-memory" in short.stderr
    assert "over --host-memory" in fit.stderr
    assert "DOES NOT FIT main memory" in fit.stdout
    one_gpu = [*words[1:-2], "--gpus", "1", "--host-memory", "1MiB"]
    step = CliRunner().invoke(main, ["step", *one_gpu, "--device", "simulated"])
    assert (step.exit_code, "over --host-memory 1.0 MiB" in step.stderr) == (3, True)
