import json
import re
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from click.testing import CliRunner, Result

from benchmarks.study.grids import FigureKind, load_study
from ligerprof.analyzers.estimate import estimate
from ligerprof.cli import study
from ligerprof.cli.main import main
from ligerprof.errors import MissingDependencyError
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.reports.figures.kinds import KINDS
from ligerprof.runs.sweep.cells import cell_key, expand
from ligerprof.units import GIB, format_bytes
from tests.paths import REPOSITORY

if sys.version_info >= (3, 11):
    pass
else:
    pass


MEMORY_LIMIT_BYTES = 47 * GIB // 2
BATCHES = (1, 4, 8, 16, 32, 64, 96, 112)
SEQUENCES = (512, 1024, 2048, 4096, 8192, 12288, 16384, 24576)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["study", *arguments], catch_exceptions=False)


def study_recipes() -> list[TrainingRecipe]:
    study = load_study()
    return list(expand([study.grid(part, device="cuda") for part in study.parts], lambda _: None)[0])


def make_row(recipe: TrainingRecipe) -> dict[str, Any]:
    """A row that claims to be measured: the estimated bytes, and a speed that depends on the provider."""
    expected = estimate(recipe)
    reserved_bytes = expected.peak_bytes + 2**30
    limit_bytes = recipe.memory_limit_bytes or 139 * GIB
    fits = reserved_bytes <= limit_bytes
    speed = 1000.0 + recipe.tokens / 10 + (0.5 if recipe.provider == "liger" else 0)
    return {
        "schema": 1,
        "kind": "cell",
        "key": cell_key(recipe),
        "status": "done" if fits else "oom",
        "error": None,
        "seconds": 30.0,
        "backend": "measured",
        "gpu": "NVIDIA Test",
        "peak_bytes": expected.peak_bytes,
        "reserved_bytes": reserved_bytes,
        "phases": {},
        "roles": expected.roles.to_json(),
        "step_seconds": recipe.tokens / speed if fits else None,
        "tokens_per_second": speed if fits else None,
        "oom": None if fits else {"limit_bytes": limit_bytes},
        "recipe": recipe.to_json(),
        "versions": {"torch": "2.11.0", "deepspeed": "0.19.8"},
        "finished": "2026-01-02T03:04:05+00:00",
    }


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return [make_row(recipe) for recipe in study_recipes()]


def write_rows(rows: list[dict[str, Any]], path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def table_under(text: str, heading: str) -> list[list[str]]:
    """The cells of the first table after a heading, row by row, its own headings first."""
    section = text.split(f"## {heading}\n")[1]
    lines = section[section.index("| ") :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line]


def test_the_parts_are_those_of_the_2024_study() -> None:
    recipes = study_recipes()
    zero = [recipe for recipe in recipes if recipe.engine == "deepspeed"]
    assert {(r.zero, r.offload, r.precision, r.optimizer, r.memory_limit_bytes, r.checkpointing) for r in zero} == {
        (3, "all", "mixed-fp16", "deepspeed-cpu-adam", MEMORY_LIMIT_BYTES, True)
    }
    for liger, provider in (("none", "ligerprof"), ("no-flce", "ligerprof"), ("all", "ligerprof"), ("all", "liger")):
        own = [r for r in zero if (r.liger, r.provider, r.loss) == (liger, provider, "hf")]
        assert {r.batch for r in own if r.seq == 1024} == set(BATCHES)
        assert {r.seq for r in own if r.batch == 4} == set(SEQUENCES)


def test_a_dry_run_lists_every_cell_without_a_gpu(tmp_path: Path) -> None:
    result = run("--dry-run", "-o", str(tmp_path / "study"))
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("to run") == len(study_recipes())
    assert not (tmp_path / "study").exists()
    ours = json.loads(run("--dry-run", "--json", "--provider", "ligerprof", "--only", "batch").stdout)
    assert {cell["recipe"]["provider"] for cell in ours["cells"]} == {"ligerprof"}
    assert len(ours["cells"]) == 3 * len(BATCHES)
    limited = json.loads(run("--dry-run", "--json", "--memory-limit", "15GiB", "--only", "seq").stdout)
    assert {cell["recipe"]["memory_limit_bytes"] for cell in limited["cells"]} == {15 * GIB}


@pytest.mark.parametrize(
    ("arguments", "exit_code", "says"),
    [
        (("--only", "batch", "--device", "simulated"), 1, "studies do not simulate DeepSpeed"),
        (("--only", "lunch"), 2, "no part 'lunch'"),
        (("--provider", "lunch"), 2, "no provider 'lunch'"),
        (("--report",), 1, "no finished cell"),
        (("--memory-limit", "some"), 2, "not a size"),
    ],
)
def test_an_expected_error_is_one_line(arguments: tuple[str, ...], exit_code: int, says: str, tmp_path: Path) -> None:
    result = run(*arguments, "-o", str(tmp_path / "study"))
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert says in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "study").exists()


@pytest.mark.slow
def test_every_number_in_the_size_tables_is_from_a_row(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    results = write_rows(rows, tmp_path / "rows.jsonl")
    folder = tmp_path / "report"
    result = run("--report", "--results", str(results), "-o", str(folder))
    assert result.exit_code == 0, result.stderr
    text = (folder / "README.md").read_text()
    columns = [("none", "ligerprof"), ("no-flce", "ligerprof"), ("all", "ligerprof"), ("all", "liger")]
    for heading, field, fixed in (("Batch", "batch", ("seq", 1024)), ("Sequence", "seq", ("batch", 4))):
        for line in table_under(text, heading)[1:]:
            size = int(line[0].replace(",", ""))
            for (liger, provider), shown in zip(columns, line[1:], strict=True):
                (row,) = (
                    row
                    for row in rows
                    if (row["recipe"]["liger"], row["recipe"]["provider"], row["recipe"]["loss"])
                    == (liger, provider, "hf")
                    and (row["recipe"][field], row["recipe"][fixed[0]]) == (size, fixed[1])
                    and row["recipe"]["engine"] == "deepspeed"
                )
                sizes = f"{row['peak_bytes'] / GIB:.2f} / {row['reserved_bytes'] / GIB:.2f}"
                assert shown == ("OOM" if row["status"] == "oom" else sizes)
    done = sum(row["status"] == "done" for row in rows)
    assert f"{len(rows)} steps, {len(rows) - done} of them out of memory, measured on NVIDIA Test, 2026-01-02" in text
    assert "torch 2.11.0, deepspeed 0.19.8" in text
    links = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert {"batch.svg", "sequence.svg", "ablation.svg", "roles.svg"} <= set(links)
    assert all((folder / link).read_text().startswith("<?xml") for link in links)


@pytest.mark.slow
def test_a_single_part_makes_a_report(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    few = [row for row in rows if row["recipe"]["batch"] in (4, 16) and row["recipe"]["liger"] == "none"]
    results = write_rows(few, tmp_path / "rows.jsonl")
    result = run("--report", "--results", str(results), "-o", str(tmp_path / "report"))
    assert result.exit_code == 0, result.stderr
    text = (tmp_path / "report" / "README.md").read_text()
    assert "## Sequence" in text
    assert "liger-kernel's" not in text
    assert table_under(text, "Borders")[1] == ["batch at 1024 tokens", "none", "4", "16"]
    # of two rows of one cell the later counts, also across files
    again = [{**row, "peak_bytes": 2 * row["peak_bytes"]} for row in few if row["status"] == "done"]
    later = write_rows(again, tmp_path / "later.jsonl")
    both = ("--results", str(results), "--results", str(later))
    assert run("--report", *both, "-o", str(tmp_path / "report")).exit_code == 1
    assert run("--report", *both, "-o", str(tmp_path / "report"), "--force").exit_code == 0
    assert f"{again[0]['peak_bytes'] / GIB:.2f} /" in (tmp_path / "report" / "README.md").read_text()


@pytest.mark.slow
def test_estimates_are_those_of_this_version_and_steps_without_one_are_counted(
    rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    done = [row for row in rows if row["status"] == "done"]
    recorded = [{**row, "estimate": {**row, "peak_bytes": 1}} for row in done]
    galore = TrainingRecipe(engine="deepspeed", precision="mixed", optimizer="galore")
    results = write_rows([*recorded, {**done[0], "key": "galore", "recipe": galore.to_json()}], tmp_path / "rows.jsonl")
    assert run("--report", "--results", str(results), "-o", str(tmp_path / "report")).exit_code == 0
    text = (tmp_path / "report" / "README.md").read_text()
    assert f"Over {len(done)} steps the estimate is off by 0.00 % in the median and by 0.00 % at worst" in text
    assert " 1 more steps cannot be estimated." in text


@pytest.mark.slow
def test_speeds_measured_hours_apart_are_listed_separately(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    def later(row: dict[str, Any]) -> dict[str, Any]:
        """liger-kernel's rows, the longer sequences two hours later and half as fast."""
        if row["recipe"]["provider"] != "liger" or row["recipe"]["seq"] <= 1024 or row["status"] != "done":
            return row
        return {**row, "tokens_per_second": row["tokens_per_second"] / 2, "finished": "2026-01-02T05:04:05+00:00"}

    results = write_rows([later(row) for row in rows], tmp_path / "rows.jsonl")
    assert run("--report", "--results", str(results), "-o", str(tmp_path / "report")).exit_code == 0
    text = (tmp_path / "report" / "README.md").read_text()
    lines = table_under(text, "Our kernels and liger-kernel's")
    apart = {line[0]: line[-1] for line in lines[1:]}
    assert {"0", "120"} == set(apart.values())
    near, far = (sum(minutes == one for minutes in apart.values()) for one in ("0", "120"))
    assert f"where both ended within 10 minutes: 0.0 % to 0.0 %, 0.0 % in the median of {near} sizes" in text
    assert f"liger-kernel's elsewhere: +99.9 % to +100.0 %, +100.0 % in the median of {far} sizes" in text
    assert "At batch 8 and sequence 1024, measured within 0 minutes:" in text


@pytest.mark.slow
def test_missing_steps_are_listed_with_the_command_that_runs_them(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    # the searches ran every size between those of the grid
    plain = next(row["recipe"] for row in rows if row["recipe"]["batch"] == 8 and row["recipe"]["liger"] == "none")
    sizes = [(batch, 1024) for batch in range(9, 16)] + [(4, seq) for seq in range(2112, 4096, 64)]
    found = [make_row(TrainingRecipe.from_json({**plain, "batch": batch, "seq": seq})) for batch, seq in sizes]
    whole = write_rows([*rows, *found], tmp_path / "whole.jsonl")
    assert run("--report", "--results", str(whole), "-o", str(tmp_path / "whole")).exit_code == 0
    assert "Not measured yet" not in (tmp_path / "whole" / "README.md").read_text()

    def is_kept(row: dict[str, Any]) -> bool:
        recipe = row["recipe"]
        alone = recipe["liger"] in ("rms", "flce")
        return not (alone or (recipe["model"] == "llama3-8b" and recipe["liger"] == "all" and recipe["batch"] > 32))

    longest = max(row["recipe"]["seq"] for row in found if row["status"] == "done")
    before = [row for row in found if row["recipe"]["seq"] != longest + 64]
    part = write_rows([*filter(is_kept, rows), *before], tmp_path / "part.jsonl")
    assert run("--report", "--results", str(part), "-o", str(tmp_path / "part")).exit_code == 0
    text = (tmp_path / "part" / "README.md").read_text()
    assert table_under(text, "Not measured yet")[1:] == [
        ["ablation", "rms", "0 of 1", "8 x 1,024"],
        ["ablation", "flce", "0 of 1", "8 x 1,024"],
        ["seq-border", "none", "", f"border above {longest:,} below {longest + 128:,}"],
        ["paper", "all", "2 of 5", "64 x 512, 96 x 512, 128 x 512"],
    ]
    assert "ligerprof study --only ablation,seq-border,paper -o FOLDER" in text
    assert "or only in part: ablation (rms; flce), seq-border (none), paper (all)." in text


def test_the_committed_report_is_that_of_the_committed_rows(tmp_path: Path) -> None:
    results = REPOSITORY / "benchmarks" / "results" / "study-h200.jsonl"
    assert run("--report", "--results", str(results), "-o", str(tmp_path / "report")).exit_code == 0
    written, committed = (folder / "README.md" for folder in (tmp_path / "report", REPOSITORY / "docs" / "study"))
    assert written.read_text() == committed.read_text(), (
        "ligerprof study --report --force -o docs/study writes it again"
    )
    figures = {path.name for path in written.parent.glob("*.svg")}
    assert figures == {path.name for path in committed.parent.glob("*.svg")}


TINY = """
title = "Two tiny models"
text = "A Llama without fused kernels and with them."
claims = ["Peak at 128 tokens: {plain} without kernels, {fused} with the fused loss.", "Nothing: {absent}."]

[kernels]
none = { liger = "none" }
flce = { liger = "flce", title = "fused loss" }

[[parts]]
name = "sequences"
options = { model = "tiny", seq = [32, 64], batch = 2, repeats = 1, optimizer = "adamw-foreach" }
kernels = ["none", "flce"]

[cells]
foreach = { optimizer = "adamw-foreach" }

[values]
plain = { find = "figure", show = "peak", where = { kernels = "none", seq = 64 } }
fused = { find = "figure", show = "peak", where = { kernels = "flce", seq = 64 } }
absent = { find = "largest", axis = "batch", where = { seq = 4096 } }

[[sections]]
title = "Sequences"
where = { cells = "foreach" }
figures = [{ name = "lengths", kind = "peak-seq", alt = "Peak against sequence" }]

[[sections.tables]]
caption = "GiB{absent}"
by = "seq"
heading = "tokens"
kernels = ["none", "flce"]
show = "peak"

[[sections]]
title = "Left out"
text = "A section whose tables and claims lack values."
claims = ["{absent}"]
"""


@pytest.mark.slow
@pytest.mark.usefixtures("quick_cells")
def test_a_user_study_runs_on_the_simulator_and_has_a_report(tmp_path: Path) -> None:
    file = tmp_path / "two.toml"
    file.write_text(TINY)
    folder = tmp_path / "study"
    result = run(str(file), "--device", "simulated", "-o", str(folder), "--json")
    assert result.exit_code == 0, result.stderr
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    peaks = {(row["recipe"]["liger"], row["recipe"]["seq"]): row["peak_bytes"] for row in rows}
    assert set(peaks) == {("none", 32), ("none", 64), ("flce", 32), ("flce", 64)}
    assert [cell["key"] for cell in json.loads(result.stdout)["cells"]] == [row["key"] for row in rows]
    text = (folder / "README.md").read_text()
    assert text.startswith("# Two tiny models\n\nA Llama without fused kernels and with them.\n")
    plain, fused = (format_bytes(peaks[kernels, 64]) for kernels in ("none", "flce"))
    assert f"- Peak at 128 tokens: {plain} without kernels, {fused} with the fused loss.\n" in text
    assert table_under(text, "Sequences") == [
        ["tokens", "none", "fused loss"],
        *([str(seq), *(f"{peaks[kernels, seq] / GIB:.2f}" for kernels in ("none", "flce"))] for seq in (32, 64)),
    ]
    assert "![Peak against sequence](lengths.svg)" in text
    assert (folder / "lengths.svg").exists()
    assert "simulated for an NVIDIA" in text
    for absent in ("Left out", "Nothing", "{", "Not measured yet"):
        assert absent not in text


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("title =", "titel =", "titel: unknown key. Known: title, "),
        ('title = "Two tiny models"', "title = 2", "title: 2 is not a string."),
        ('liger = "none" }', 'ligar = "none" }', "kernels.none.ligar: unknown key."),
        ("seq = [32, 64]", 'seq = [32, "long"]', "parts[0].options.seq: seq is 'long'."),
        ("seq = [32, 64]", "sequence = 32", "parts[0].options.sequence: unknown option."),
        ("seq = [32, 64]", "seq = 0", "parts[0].options.seq: seq is 0."),
        ('kernels = ["none", "flce"]', 'kernels = ["all"]', "parts[0].kernels[0]: 'all' is not defined."),
        ('find = "largest"', 'find = "longest"', "values.absent.find: unknown value 'longest'."),
        ('by = "seq"', 'by = "lunch"', "sections[0].tables[0].by: unknown value 'lunch'."),
        ("where = { cells", "where = { cell", "sections[0].where.cell: unknown option."),
        ('claims = ["{absent}"]', 'claims = ["{nothing}"]', "sections[1].claims[0]: 'nothing' is not defined."),
        ('claims = ["{absent}"]', 'claims = ["{absent"]', "expected '}' before end of string"),
        ('claims = ["{absent}"]', 'claims = ["{absent:999999999}"]', "a width of two digits"),
        ('claims = ["{absent}"]', 'claims = ["{absent.__class__}"]', "'absent.__class__' is not defined."),
        ("[kernels]", "[kernels", "two.toml: not readable as TOML (Expected"),
        ("seq = [32, 64]", f"seq = {'9' * 5000}", "two.toml: not readable as TOML (Exceeds"),
    ],
)
def test_an_invalid_study_file_is_refused_in_one_line_before_anything_runs(
    old: str, new: str, says: str, tmp_path: Path
) -> None:
    file = tmp_path / "two.toml"
    assert old in TINY
    file.write_text(TINY.replace(old, new, 1))
    result = run(str(file), "--device", "simulated", "-o", str(tmp_path / "study"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"Error: {file}: ")
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "study").exists()


def test_the_study_of_2024_is_a_file_like_any_other() -> None:
    assert load_study(REPOSITORY / "benchmarks" / "study" / "liger-2024.toml") == load_study()


def test_without_the_repository_the_command_says_where_its_script_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "_REPOSITORY", tmp_path)
    assert study._script() is None
    result = CliRunner().invoke(study._absent, ["--dry-run"])
    assert isinstance(result.exception, MissingDependencyError)
    assert "benchmarks/study" in str(result.exception)


def test_figures_of_a_study_are_kinds_that_plot_draws_from_cells() -> None:
    assert set(get_args(FigureKind)) <= set(KINDS) - {"memory", "layers", "kernels"}
