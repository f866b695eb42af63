import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ligerprof.cli.main import main
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.reports.figures.kinds import KINDS, SnapshotSource, Sources
from tests.paths import REPOSITORY
from tests.reports.figures.figures_data import KERNELS, SNAPSHOTS, STEPS, row

RUNNER = CliRunner()
RECORDING = SNAPSHOTS / "small-sgd-accum.pickle.xz"


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """A folder as a sweep leaves it: two sets at three batches, one out of memory, one failed."""
    folder = tmp_path / "sweep"
    folder.mkdir()
    rows = [
        row(TrainingRecipe(model="tiny", seq=64, batch=batch, liger=liger), backend="simulated")
        for liger in ("none", "all")
        for batch in (1, 2, 4)
    ]
    rows[2] |= {"status": "oom", "oom": {"limit_bytes": 2**27}}
    rows.append({**rows[1], "key": "lost", "status": "failed", "error": "killed", "peak_bytes": None})
    (folder / "results.jsonl").write_text("".join(json.dumps(values) + "\n" for values in rows))
    return folder


def run(*arguments: str | Path) -> tuple[int, str, str]:
    result = RUNNER.invoke(main, ["plot", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_all_that_a_sweep_allows_is_drawn_and_listed(sweep: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, stdout, stderr = run(sweep, "-o", out)
    assert code == 0
    assert stderr.startswith("left out: 1 failed cell, such as tiny, 2 x 64 tokens, ")
    names = ["peak-batch", "ablation", "roles-batch"]
    assert stdout.split() == [str(out / f"{name}.{suffix}") for name in names for suffix in ("png", "svg")]
    assert sorted(out.iterdir()) == sorted(map(Path, stdout.split()))
    drawn = (out / "peak-batch.svg").read_text()
    assert all(words in drawn for words in ("simulated", "NVIDIA H200", "batch, sequences", "out of memory"))


def test_json_lists_figures_and_what_is_left_out(sweep: Path, tmp_path: Path) -> None:
    code, stdout, _ = run(sweep, "-o", tmp_path / "out", "--json", "--format", "svg")
    printed = json.loads(stdout)
    assert (code, printed["schema"], printed["kind"]) == (0, 1, "plot")
    assert [Path(path).suffix for figure in printed["figures"] for path in figure["files"]] == [".svg"] * 3
    reasons = {entry["kind"]: entry["reason"] for entry in printed["left_out"]}
    assert "simulated steps have none" in reasons["batch"]
    assert {figure["kind"] for figure in printed["figures"]} | set(reasons) == set(KINDS)


def test_nothing_is_overwritten(sweep: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "roles-batch.svg").write_text("mine")
    code, stdout, stderr = run(sweep, "-o", out)
    assert (code, stdout) == (1, "")
    assert stderr.splitlines()[-1].startswith(f"Error: {out / 'roles-batch.svg'}: exists.")
    assert [path.name for path in out.iterdir()] == ["roles-batch.svg"]
    assert run(sweep, "-o", out, "--force")[0] == 0
    assert (out / "roles-batch.svg").read_text() != "mine"


def test_sources_of_all_kinds_go_together(sweep: Path, tmp_path: Path) -> None:
    code, stdout, _ = run(STEPS, RECORDING, sweep, "-o", tmp_path, "--format", "svg")
    names = {Path(path).stem for path in stdout.split()}
    assert code == 0
    assert names >= {"memory", "layers", "accuracy", "ablation", "peak-batch"}


def test_a_run_directory_is_a_cell_and_a_recording(tmp_path: Path) -> None:
    runs = [tmp_path / name for name in ("none", "all")]
    for folder in runs:
        arguments = ["step", "--device", "simulated", "--model", "tiny", "--seq", "64", "--liger", folder.name]
        assert RUNNER.invoke(main, [*arguments, "-o", str(folder)]).exit_code == 0
    code, stdout, stderr = run(*runs, "-o", tmp_path / "out", "--format", "svg")
    assert (code, stderr) == (0, "")
    assert {Path(path).stem for path in stdout.split()} == {"ablation", "roles", "memory", "layers-1", "layers-2"}
    drawn = (tmp_path / "out" / "memory.svg").read_text()
    assert all(words in drawn for words in (">none<", ">all<", "simulated", "backward"))


def test_recordings_are_named_by_what_tells_them_apart() -> None:
    def named(*titles: tuple[str, ...]) -> tuple[str, ...]:
        sources = Sources(snapshots=tuple(SnapshotSource(path=Path("x"), titles=one) for one in titles))
        return sources.titles

    ours, theirs = ("all", "all, ligerprof", "all, 4 x 8", "001"), ("all", "all, liger", "all, 4 x 8", "002")
    larger = ("all", "all, ligerprof", "all, 16 x 8", "003")
    assert named() == ()
    assert named(ours, ("none", "none", "none, 4 x 8", "000")) == ("all", "none")
    assert named(ours, theirs) == ("all, ligerprof", "all, liger")
    assert named(ours, larger) == ("all, 4 x 8", "all, 16 x 8")
    assert named(ours, theirs, larger) == ("001", "002", "003")
    assert named(ours, ("mine",)) == ("all", "mine")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([STEPS, "--kind", "peak-batch"], 1, "peak-batch: nothing to draw. It needs cells that ran at two batches"),
        ([KERNELS, "--kind", "roles"], 1, "this is records of a bench, which `ligerprof plot` does not read"),
        ([STEPS, "--format", "png,gif"], 2, "'gif'"),
        (["--kind", "memory"], 1, "memory: nothing to draw. It needs a memory snapshot"),
        ([REPOSITORY / "tests"], 1, "neither results.jsonl nor result.json nor snapshot.pickle"),
        ([REPOSITORY / "README.md"], 1, "README.md"),
        (["no-such.jsonl"], 2, "no-such.jsonl"),
    ],
    ids=lambda value: " ".join(Path(word).name for word in value) if isinstance(value, list) else "",
)
def test_what_cannot_be_drawn_is_one_line(arguments: list[str | Path], code: int, says: str, tmp_path: Path) -> None:
    found, stdout, stderr = run(*arguments, "-o", tmp_path / "out")
    assert (found, stdout) == (code, "")
    assert stderr.splitlines()[-1].startswith("Error: ")
    assert says in stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_a_damaged_row_is_one_line(sweep: Path, tmp_path: Path) -> None:
    results = sweep / "results.jsonl"
    results.write_text(results.read_text().replace('"kind": "cell"', '"kind": "cell', 1))
    code, stdout, stderr = run(sweep, "-o", tmp_path / "out")
    assert (code, stdout, stderr.count("\n")) == (1, "", 1)
    assert "results.jsonl, line 1" in stderr
