import io
from dataclasses import replace

from ligerprof.analyzers.compare import Figures, compare
from ligerprof.reports.diff import column_titles, render_comparison
from ligerprof.reports.terminal import console
from ligerprof.roles import MemoryBreakdown, Phase, Role
from ligerprof.units import MIB

MEASURED = Figures(
    source="runs/001",
    backend="measured",
    peak_bytes=3 * MIB,
    phases={Phase.FORWARD: 3 * MIB},
    roles=MemoryBreakdown(roles={Role.LOGITS: 2 * MIB, Role.PARAMETERS: MIB}),
)
ESTIMATED = replace(MEASURED, backend="estimated", source="runs/001 (estimate)", peak_bytes=2 * MIB)


def test_titles_are_as_short_as_they_can_be() -> None:
    assert column_titles(compare([MEASURED, ESTIMATED])) == ["measured", "estimated"]
    other = replace(MEASURED, source="runs/002")
    assert column_titles(compare([MEASURED, other])) == ["001 measured", "002 measured"]
    namesake = replace(MEASURED, source="elsewhere/001")
    assert column_titles(compare([MEASURED, namesake])) == ["1 measured", "2 measured"]


def test_every_source_has_a_line_and_every_phase_a_cell() -> None:
    buffer = io.StringIO()
    console(buffer).print(render_comparison(compare([MEASURED, ESTIMATED])))
    text = buffer.getvalue()
    assert "measured: runs/001\n" in text.replace(" \n", "\n")
    assert "error: against measured" in text
    assert "n/a" in text
    assert "-33.33 %" in text


def test_runs_show_differences_and_predictions_errors() -> None:
    other = replace(MEASURED, source="runs/002", peak_bytes=4 * MIB)
    for columns, word in (
        ([MEASURED, ESTIMATED], "error"),
        ([MEASURED, other], "difference"),
        ([MEASURED, replace(ESTIMATED, source="runs/002 (estimate)")], "difference"),
    ):
        buffer = io.StringIO()
        console(buffer).print(render_comparison(compare(columns)))
        found = {each for each in ("error", "difference") if each in buffer.getvalue()}
        assert found == {word}
