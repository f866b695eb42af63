"""Tables keep every value whole: drawn ones, and those of the commands, at many widths."""

import io
from collections.abc import Iterator

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from ligerprof.cli.main import main
from ligerprof.reports.console import PlainConsole
from ligerprof.reports.listing import listing_table
from ligerprof.reports.whole_table import WholeTable
from tests.paths import DATA, RECORDINGS

WIDTHS = (60, 80, 100, 160)
SMALL = str(RECORDINGS / "small-lora.pickle.xz")
COMMANDS = {
    "models": ["models"],
    "env": ["env"],
    "kernels": ["kernels", "--model", "llama3.2-1b"],
    "estimate": ["estimate", "--model", "llama3.1-70b", "--by", "layer"],
    "explain": ["explain", SMALL, "--stacks"],
    "explain-layers": ["explain", SMALL, "--by", "layer"],
    "oom": ["explain", str(RECORDINGS / "small-oom.pickle.xz")],
    "diff": ["diff", SMALL, str(RECORDINGS / "small-own-all.pickle.xz")],
    "compare": [
        "compare",
        SMALL,
        str(RECORDINGS / "small-own-all.pickle.xz"),
        str(RECORDINGS / "small-zero3.pickle.xz"),
    ],
    "trace": ["trace", str(DATA / "traces" / "llama3.2-1b-step.pt.trace.json.xz")],
}
WORDS = st.text("abcdefghij._-/0123456789,", min_size=1, max_size=24)
CELLS = st.lists(WORDS, max_size=4).map(" ".join)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[str], list[str], list[list[str]]]:
    """Headings, those of columns that may wrap, and rows."""
    headings = draw(st.lists(WORDS, min_size=1, max_size=6, unique=True))
    folded = draw(st.lists(st.sampled_from(headings), unique=True))
    rows = draw(st.lists(st.tuples(*[CELLS] * len(headings)).map(list), min_size=1, max_size=4))
    return headings, folded, rows


@given(tables(), st.integers(30, 170))
def test_drawn_tables_keep_their_words(drawn: tuple[list[str], list[str], list[list[str]]], width: int) -> None:
    headings, folded, rows = drawn
    file = io.StringIO()
    console = PlainConsole(file=file, width=width, force_terminal=True, color_system=None)
    console.print(listing_table(*headings, folded=folded, rows=rows))
    printed = file.getvalue()

    assert max(map(len, printed.splitlines())) <= width
    for row in rows:
        for word in " ".join(row).split():
            assert word in printed


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every cell that is added to a table of a report."""
    found: list[str] = []
    add_row = WholeTable.add_row

    def keep(table: WholeTable, *row: str | Text, **options: bool) -> None:
        found.extend(cell.plain if isinstance(cell, Text) else cell for cell in row)
        add_row(table, *row, **options)

    monkeypatch.setattr(WholeTable, "add_row", keep)
    yield found
    assert found


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", COMMANDS)
def test_every_value_of_a_command_is_whole(
    cells: list[str], monkeypatch: pytest.MonkeyPatch, name: str, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    result = CliRunner().invoke(main, COMMANDS[name], catch_exceptions=False)

    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= width
    joined = "".join(result.stdout.split())
    for cell in cells:
        for word in cell.split():
            # a word longer than half a terminal is a path, which is folded
            assert word in (result.stdout if len(word) < 28 else joined)


def test_a_pipe_gets_as_many_columns_as_its_tables_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    file = io.StringIO()
    PlainConsole(file=file, width=40).print(listing_table("a", "b", rows=[["x" * 50, "y" * 50]]))

    assert f"{'x' * 50}   {'y' * 50}" in file.getvalue()
