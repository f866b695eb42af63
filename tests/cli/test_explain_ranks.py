import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ligerprof.analyzers.explain.analysis import analyze, explain
from ligerprof.analyzers.explain.peak import diff_peaks
from ligerprof.analyzers.explain.ranks import RankPeak, RanksReport
from ligerprof.cli.main import main
from ligerprof.reports.diff import RANK_HEADS, SPREAD_HEADS, group_rows, signed_mib
from ligerprof.reports.page.peak import render_ranks_page
from ligerprof.roles import Role
from ligerprof.units import format_mib
from tests.golden import assert_matches_golden
from tests.paths import RECORDINGS
from tests.reports.page.test_diff import Cells
from tests.reports.page.test_html import ATTACKS, Elements, hostile_snapshot
from tests.reports.page.unpacking import recordings_of

GOLDEN = Path(__file__).parent / "golden"
# in place of ranks: the same model, recorded with and without checkpointing
NAMES = ("small-streams", "small-python-alloc-nockpt", "small-late")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make(tmp_path / "ranks", *NAMES)


def make(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for rank, name in enumerate(names):
        shutil.copy(RECORDINGS / f"{name}.pickle.xz", folder / f"rank{rank}.pickle.xz")
    return folder


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["explain", *map(str, arguments)])


def test_json_lists_the_ranks_worst_first_with_what_differs(folder: Path) -> None:
    result = run(folder, "--json")

    ranks = json.loads(result.stdout)
    reports = {rank: explain(folder / f"rank{rank}.pickle.xz") for rank in range(3)}
    assert (result.exit_code, result.stderr) == (0, "")
    assert (ranks["schema"], ranks["kind"]) == (1, "ranks")
    assert [each["rank"] for each in ranks["ranks"]] == [1, 0, 2]
    assert (ranks["worst_rank"], ranks["lowest_rank"]) == (1, 0)
    for each in ranks["ranks"]:
        assert each["peak_bytes"] == reports[each["rank"]].peak_bytes == sum(each["roles"].values())
    for spread in ranks["differences"]:
        sizes = [report.roles[Role(spread["role"])] for report in reports.values()]
        assert (spread["least_bytes"], spread["most_bytes"]) == (min(sizes), max(sizes))
        assert reports[spread["most_rank"]].roles[Role(spread["role"])] == max(sizes)
    rounding = reports[1].roles[Role.ALLOCATOR_ROUNDING] - reports[0].roles[Role.ALLOCATOR_ROUNDING]
    assert sum(block["difference_bytes"] for block in ranks["blocks"]) + rounding == ranks["difference_bytes"]


def test_printed_ranks_are_the_golden_ones(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)

    result = run("ranks", "--top", "4")

    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert_matches_golden(result.stdout, GOLDEN / "explain_ranks.txt")


def test_a_rank_out_of_memory_comes_first(tmp_path: Path) -> None:
    result = run(make(tmp_path / "ranks", "small-streams", "small-oom"))

    assert result.stdout.startswith("Out of memory on rank 1 of 2; rank 1 peaks at ")
    assert result.exit_code == 0


def test_equal_ranks_have_no_differences(tmp_path: Path) -> None:
    result = run(make(tmp_path / "ranks", "small-streams", "small-streams"))

    assert result.stdout.startswith("All 2 ranks peak at 1002.4 MiB.")
    assert "difference" not in result.stdout


def test_the_highest_rank_is_judged_by_max_peak(folder: Path) -> None:
    result = run(folder, "--max-peak", "1100MiB", "--json")

    assert result.exit_code == 3
    assert "the peak of 1178.8 MiB is over --max-peak 1100.0 MiB" in result.stderr


def test_page_has_the_ranks_and_the_worst_ones_recording(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    result = run(folder, "--html", path, "--json")

    page, ranks = path.read_text(encoding="utf-8"), json.loads(result.stdout)
    assert result.exit_code == 0
    assert [data["marks"]["peak"]["bytes"] for data in recordings_of(page)] == [ranks["ranks"][0]["peak_bytes"]]
    rows = Cells(page).rows
    shown = [row[:2] for row in rows if len(row) == len(RANK_HEADS) and row[0].isdigit()]
    assert shown == [[str(each["rank"]), format_mib(each["peak_bytes"])] for each in ranks["ranks"]]
    for spread in ranks["differences"]:
        sizes = [format_mib(spread[name]) for name in ("least_bytes", "most_bytes")]
        visible = format_mib(spread["difference_bytes"]) != format_mib(0)
        shown_sizes = [[*row[:2], row[3]] for row in rows if len(row) == len(SPREAD_HEADS)]
        assert ([spread["role"], *sizes] in shown_sizes) is visible
    lowest, worst = (explain(folder / f"rank{rank}.pickle.xz") for rank in (0, 1))
    changes = [[row.role, signed_mib(row.change_bytes), row.counts] for row in group_rows(diff_peaks(lowest, worst))]
    # the third cell is the bar of a change
    assert [[*row[:2], row[3]] for row in rows if len(row) == 5 and " > " in row[3]] == changes
    assert run(folder, "--html", path).exit_code == 1


def test_names_of_files_and_what_they_hold_never_become_markup(tmp_path: Path) -> None:
    worst = analyze(hostile_snapshot())
    peaks = [RankPeak(rank=rank, source=Path(ATTACKS[0]), report=worst.peak) for rank in range(2)]

    page = render_ranks_page(RanksReport(ranks=tuple(peaks)), worst, source=ATTACKS[0])

    for tag, attributes in Elements(page).elements:
        assert tag != "img"
        assert not {"src", "href"} & set(attributes), tag
        assert not any(name.startswith("on") for name in attributes)


@pytest.mark.parametrize("options", [["--format", "markdown"], ["--stacks"], ["--by", "layer"]])
def test_options_for_one_rank_are_a_usage_error(folder: Path, options: list[str]) -> None:
    result = run(folder, *options)

    assert (result.exit_code, result.stdout) == (2, "")
    assert "give its file" in result.stderr
