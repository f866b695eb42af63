import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ligerprof.analyzers.search.budget import Judge
from ligerprof.analyzers.search.fit import fit
from ligerprof.cli.main import main
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.recipe.usable_memory import find_limit
from ligerprof.units import MIB
from tests.golden import assert_matches_golden

GOLDEN = Path(__file__).parent / "golden"
TERMINAL_COLUMNS = 100


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["fit", *arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("fit_study", "--engine deepspeed --precision mixed-fp16 --zero 3 --offload all"),
        ("fit_unfit", "--batch 8"),
    ],
    ids=["study", "unfit"],
)
def test_printed_answers(name: str, arguments: str) -> None:
    code, stdout, stderr = run("--memory-limit", "23.5GiB", "--no-simulate", *arguments.split())

    assert code == 0
    assert "simulating" not in stderr
    assert max(map(len, stdout.splitlines())) <= TERMINAL_COLUMNS
    assert_matches_golden(stdout, GOLDEN / f"{name}.txt")


def test_json_is_what_the_library_returns() -> None:
    code, stdout, _ = run(
        "--model", "tiny", "--seq", "128", "--memory-limit", "100MiB", "--batch", "40", "--no-simulate", "--json"
    )

    recipe = TrainingRecipe(model="tiny", seq=128, memory_limit_bytes=100 * MIB, batch=40)
    assert code == 0
    assert json.loads(stdout) == fit(recipe, Judge(find_limit(recipe), None), lambda _text: None).to_json()


@pytest.mark.slow
def test_the_border_is_simulated_both_steps_within_the_limit() -> None:
    from ligerprof.runs.simulated import simulate_step

    code, stdout, stderr = run("--model", "tiny", "--seq", "512", "--memory-limit", "120MiB", "--json")

    found = json.loads(stdout)
    assert code == 0
    assert (found["kind"], found["limit_bytes"], found["limit_source"]) == ("fit", 120 * MIB, "--memory-limit")
    assert {point["checked"] for point in found["frontier"]} == {"simulated"}
    assert "simulating tiny, 4 x 512 tokens" in stderr
    limited = {"model": "tiny", "seq": 512, "memory_limit_bytes": 120 * MIB}
    last, next_one = (simulate_step(TrainingRecipe(batch=found["batch"] + more, **limited)) for more in (0, 1))
    assert last.oom is None
    assert max(last.reserved_bytes, last.first_step_reserved_bytes) == found["borders"]["batch"]["held_bytes"]
    assert next_one.oom is not None


@pytest.mark.slow
def test_nothing_that_fits_is_exit_3_with_the_answer_printed() -> None:
    code, stdout, stderr = run("--model", "tiny", "--memory-limit", "8MiB", "--no-simulate")

    assert code == 3
    assert "Largest batch at 1024 tokens: none" in stdout
    assert stderr.splitlines()[-1].startswith("Error: no batch and no sequence of this recipe fits 8.0 MiB.")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--gpu", "t4", "--memory-limit", "24GiB"], 2, "is more than Tesla T4 has"),
        (["--optimizer", "galore", "--seq", "0"], 2, "--seq"),
        (["--figure", "frontier.txt"], 2, "cannot be written as '.txt'"),
    ],
    ids=["limit", "seq", "figure"],
)
def test_wrong_usage_is_one_line(arguments: list[str], code: int, says: str) -> None:
    found, stdout, stderr = run(*arguments)

    assert (found, stdout) == (code, "")
    assert says in stderr.splitlines()[-1]
    assert stderr.splitlines()[-1].startswith("Error: ")


def test_the_frontier_is_drawn_and_not_overwritten(tmp_path: Path) -> None:
    figure = tmp_path / "new" / "frontier.svg"
    arguments = (
        "--model",
        "tiny",
        "--memory-limit",
        "100MiB",
        "--seq",
        "128",
        "--no-simulate",
        "--figure",
        str(figure),
    )

    assert run(*arguments)[0] == 0
    drawn = figure.read_text(encoding="utf-8")
    assert "fits 100.0 MiB (estimated)" in drawn
    assert "sequence, tokens" in drawn

    code, stdout, stderr = run(*arguments)
    assert (code, stdout) == (1, "")
    assert stderr == f"Error: {figure}: exists. Add --force to overwrite it.\n"
    assert run(*arguments, "--force")[0] == 0


@pytest.mark.parametrize("command", ["fit", "advise"])
def test_no_simulate_imports_no_torch(command: str) -> None:
    code = (
        "import sys\n"
        "from ligerprof.cli.main import main\n"
        "main(sys.argv[1:], standalone_mode=False)\n"
        "print('torch' in sys.modules, file=sys.stderr)\n"
    )
    arguments = [command, "--model", "tiny", "--memory-limit", "1GiB", "--no-simulate"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "False"


def test_a_system_without_affinities_simulates_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")

    code, stdout, _ = run("--model", "tiny", "--seq", "64", "--memory-limit", "100MiB", "--no-simulate")

    assert code == 0
    assert "largest batch" in stdout


def test_the_fastest_recipes_are_listed_with_the_next_faster_one() -> None:
    arguments = ("--model", "smollm2-135m", "--batch", "1", "--precision", "bf16", "--memory-limit", "1700MiB")
    code, stdout, _ = run("--fastest", "--no-simulate", *arguments)
    assert code == 0
    assert max(map(len, stdout.splitlines())) <= TERMINAL_COLUMNS
    assert_matches_golden(stdout, GOLDEN / "fit_fastest.txt")


def test_the_plan_is_printed_with_how_to_apply_it() -> None:
    arguments = (
        "--model",
        "tiny",
        "--batch",
        "1024",
        "--seq",
        "512",
        "--precision",
        "bf16",
        "--gpu",
        "h200",
        "--liger",
        "flce",
    )
    code, stdout, _ = run("--plan", "--no-simulate", "--memory-limit", "4GiB", *arguments)
    assert code == 0
    assert max(map(len, stdout.splitlines())) <= TERMINAL_COLUMNS
    assert_matches_golden(stdout, GOLDEN / "fit_plan.txt")
    code, stdout, _ = run("--plan", "--no-simulate", "--memory-limit", "4GiB", "--json", *arguments)
    found = json.loads(stdout)
    assert sum(each["layers"] for each in found["layers"]) == 2
    assert found["plan"]["fits"]
    assert found["selection"] == ",".join(f"{each['layers']}*{each['keep']}" for each in found["layers"])
    assert found["plan"]["step_seconds"] <= found["by_keys"]["step_seconds"]
    code, _, stderr = run("--plan", "--no-simulate", "--memory-limit", "100MiB", *arguments)
    assert code == 3
    assert "no plan of this recipe fits" in stderr


def test_no_figure_of_the_fastest_recipes() -> None:
    code, _, stderr = run("--fastest", "--figure", "frontier.svg")
    assert code == 2
    assert "--fastest does not look for" in stderr
