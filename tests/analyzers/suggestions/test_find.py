import pytest

from ligerprof.analyzers.explain.analysis import analyze, explain
from ligerprof.analyzers.suggestions.replayed_change import Edit
from ligerprof.analyzers.suggestions.suggestion import Cost
from ligerprof.analyzers.suggestions.table import ROWS
from tests.paths import RECORDINGS

# how far a predicted lowering of the peak may be off
SAVING_TOLERANCE = 0.05

RECORDED = sorted(RECORDINGS.glob("*.pickle.xz"))


def test_the_fused_loss_lowers_the_peak_as_liger_kernel_did() -> None:
    report = explain(RECORDINGS / "hf-ckpt-4x1024.pickle.xz")
    # max_memory_allocated of the same step with liger-kernel's fused loss
    achieved = report.peak_bytes - explain(RECORDINGS / "liger-flce-ckpt-4x1024.pickle.xz").peak_bytes

    suggestion = report.suggestions[0]

    assert suggestion.name == "fused-loss"
    assert suggestion.saves_bytes == pytest.approx(achieved, rel=SAVING_TOLERANCE)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name.partition(".")[0])
def test_suggestions_are_sorted_and_add_up(path: object) -> None:
    analysis = analyze(path)  # type: ignore[arg-type]
    report = analysis.peak
    costs = [list(Cost).index(one.cost) for one in report.suggestions]
    before = {one.saves_bytes + one.new_peak_bytes for one in report.suggestions if one.saves_bytes is not None}

    assert costs == sorted(costs)
    assert len(before) <= 1
    if not analysis.replayed.failures:
        assert before <= {report.peak_bytes}
    assert all(one.how for one in report.suggestions)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name.partition(".")[0])
def test_nothing_is_suggested_that_the_recording_already_does(path: object) -> None:
    names = {one.name for one in explain(path).suggestions}  # type: ignore[arg-type]
    name = str(path)

    assert not ("ckpt" in name and "nockpt" not in name and "checkpointing" in names)
    assert not ("liger" in name and "fused-loss" in names)


def test_every_row_has_lines_for_some_framework() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert row.how, row.name
        assert all(lines and all(line.strip() for line in lines) for lines in row.how.values()), row.name


def test_an_edit_that_changes_nothing_keeps_the_peak() -> None:
    analysis = analyze(RECORDINGS / "hf-ckpt-4x1024.pickle.xz")

    assert Edit(analysis.replayed).highest(slice(None), None) == (analysis.peak.peak_bytes, analysis.peak_moment)
