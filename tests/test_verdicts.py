"""One recipe, one verdict: no command says "fits" where another says "does not fit".

`drawn.jsonl` in tests/data/verdicts has recipes of the catalog with a limit within 4 % of their allocated or reserved
peak, both drawn, and whether the step ran in the simulation under that limit. `lengths.jsonl` has recipes over drawn
lengths, and under which limits their whole run is simulated. `files` has configuration files as public repositories
have them.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ligerprof.analyzers.estimate import Answer, estimate, judge
from ligerprof.analyzers.search.budget import Judge
from ligerprof.cli.main import main
from ligerprof.library import make_judge
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.recipe.usable_memory import find_limit
from tests.paths import DATA

VERDICTS = DATA / "verdicts"
ROWS = [json.loads(line) for line in (VERDICTS / "drawn.jsonl").read_text(encoding="utf-8").splitlines()]
FILES = json.loads((VERDICTS / "files.json").read_text(encoding="utf-8"))
# of the drawn recipes; docs/accuracy.md quotes it
MOST_OPEN = 2
QUICK = 6


def check(row: dict[str, Any]) -> Answer:
    """Compare the verdicts of what does not simulate with each other, and with the simulation's."""
    recipe = TrainingRecipe(**row["options"], memory_limit_bytes=row["memory_limit_bytes"])
    estimated = estimate(recipe).verdict
    assert estimated is not None
    # of `fit --no-simulate` and `advise --no-simulate`
    assert Judge(find_limit(recipe)).verdict(recipe).answer is estimated
    assert estimated == row["estimated"]
    assert estimated.fits in (None, row["simulated"] == "fits"), recipe.summary
    return estimated


@pytest.mark.parametrize("row", ROWS[:: len(ROWS) // QUICK], ids=lambda row: row["options"]["model"])
def test_drawn_recipes_near_a_limit(row: dict[str, Any]) -> None:
    check(row)


def test_few_verdicts_are_left_open() -> None:
    assert len(ROWS) >= 60
    assert sum(row["estimated"] == "may not fit" for row in ROWS) <= MOST_OPEN
    assert all(row["estimated"] in ("may not fit", row["simulated"]) for row in ROWS)
    assert {row["simulated"] for row in ROWS} == {"fits", "does not fit"}


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["options"]["model"])
def test_all_drawn_recipes_and_their_simulation(row: dict[str, Any]) -> None:
    check(row)
    recipe = TrainingRecipe(**row["options"], memory_limit_bytes=row["memory_limit_bytes"])
    judge = make_judge(recipe, simulate=True, progress=lambda _text: None)
    assert judge.verdict(recipe).answer == row["simulated"]


RUNS = [json.loads(line) for line in (VERDICTS / "lengths.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("row", [RUNS[0], *(pytest.param(row, marks=pytest.mark.slow) for row in RUNS[1:])])
def test_verdicts_over_drawn_lengths(row: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, row["lengths"])), encoding="utf-8")
    run = estimate(TrainingRecipe(**row["options"], lengths=str(path))).run
    for limit_bytes, fits in row["answers"]:
        answer = judge(limit_bytes, run.completes_under, uncertain_share=run.uncertain_share)
        assert answer.fits in (None, fits), limit_bytes


def answers(case: dict[str, Any]) -> list[Any]:
    """The verdict of each command that does not simulate."""
    found = []
    for command, keys in (
        (["estimate"], ("verdict",)),
        (["advise", "--no-simulate"], ("verdict", "verdict")),
        (["fit", "--no-simulate"], ("wanted", "verdict")),
    ):
        arguments = [*command, *case["arguments"], "--memory-limit", case["memory_limit"], "--json"]
        value: Any = json.loads(CliRunner().invoke(main, arguments).stdout)
        for key in keys:
            value = value[key]
        found.append(value)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_files_as_repositories_have_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(VERDICTS / "files")
    case = FILES[name]
    assert answers(case) == [case["estimated"]] * 3
    estimated = json.loads(
        CliRunner()
        .invoke(main, ["estimate", *case["arguments"], "--memory-limit", case["memory_limit"], "--json"])
        .stdout
    )
    recipe = TrainingRecipe.from_json(estimated["recipe"])
    simulated = make_judge(recipe, simulate=True, progress=lambda _text: None).verdict(recipe)
    assert case["estimated"] in ("may not fit", simulated.answer)
