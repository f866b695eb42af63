"""The page of two recordings: what changed, to the byte, and both recordings' data."""

from html.parser import HTMLParser

from ligerprof.analyzers.explain.analysis import analyze
from ligerprof.analyzers.explain.peak import diff_peaks
from ligerprof.reports.diff import group_rows
from ligerprof.reports.page.peak import render_diff_page
from ligerprof.roles import Role
from ligerprof.units import format_mib
from tests import recorded
from tests.reports.page.test_html import ATTACKS, hostile_snapshot
from tests.reports.page.unpacking import recordings_of


class Cells(HTMLParser):
    """The text of a page's table cells, row by row."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self._inside = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self._inside = True
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.rows[-1][-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "td"


def test_both_recordings_and_their_changes_are_in_the_page() -> None:
    names = ("hf-ckpt-4x1024", "liger-flce-ckpt-4x1024")
    before, after = (recorded.analysis(name) for name in names)

    page = render_diff_page(before, after, sources=names)

    peaks = [data["marks"]["peak"]["bytes"] for data in recordings_of(page)]
    assert peaks == [before.peak.peak_bytes, after.peak.peak_bytes]
    rows = Cells(page).rows
    for role in Role:
        sizes = before.peak.roles[role], after.peak.roles[role]
        shown = [
            row[1:3] for row in rows if row and row[0] == role.value and len(row) == 5 and row[3][:1] in "+-0123456789"
        ]
        texts = [format_mib(size) for size in sizes]
        # a row of zeros says nothing
        assert (texts in shown) is (texts != ["0.0", "0.0"])


def test_rows_of_groups_add_up_to_the_change() -> None:
    before, after = (recorded.analysis(name) for name in ("small-autocast", "small-lora"))
    diff = diff_peaks(before.peak, after.peak)

    rounding = diff.role_difference_bytes(Role.ALLOCATOR_ROUNDING)
    assert sum(row.change_bytes for row in group_rows(diff)) + rounding == diff.difference_bytes


def test_names_of_files_stay_text() -> None:
    analysis = analyze(hostile_snapshot())
    page = render_diff_page(analysis, analysis, sources=(ATTACKS[0], ATTACKS[1]))

    assert ATTACKS[0] not in page
    assert ATTACKS[1] not in page
