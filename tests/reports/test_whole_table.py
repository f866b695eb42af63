"""Tables keep every value whole: drawn ones, and those of the commands, at many widths."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from ligerprof.cli.main import main
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.reports.console import PlainConsole, WholeTable
from ligerprof.reports.terminal import groups_table, listing_table
from ligerprof.runs.bench.records import Finding, write_lines
from ligerprof.runs.sweep.cells import cell_key
from tests.cli.test_bench import ENVIRONMENT, example_records
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
    "bench": ["bench", "--from", "bench.jsonl"],
    "fit": ["fit", "--model", "tiny", "--memory-limit", "235MiB", "--batch", "16", "--no-simulate"],
    "sweep": ["sweep", "--model", "tiny", "--batch", "1,2,64", "--device", "simulated", "-o", "sweep"],
    "sweep-plan": ["sweep", "--model", "tiny", "--liger", "none,all", "--device", "simulated", "--dry-run"],
    "advise": ["advise", "--model", "tiny", "--memory-limit", "100MiB", "--batch", "16", "--no-simulate"],
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


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with records of bench and a finished sweep, in which one cell was out of memory and one failed."""
    folder = tmp_path_factory.mktemp("results")
    findings = (Finding(record=record, environment=ENVIRONMENT) for record in example_records())
    (folder / "bench.jsonl").write_text(write_lines(findings))
    step = {
        "backend": "simulated",
        "gpu": "NVIDIA H200",
        "phases": {"forward": 84022272, "backward": 123456789012, "optimizer": 71982592},
        "roles": {"parameters": 123456789012},
        "peak_bytes": 123456789012,
        "reserved_bytes": 150323855360,
        "step_seconds": 123.456,
        "tokens_per_second": 1234567.8,
        "oom": None,
    }
    rows = []
    for batch, status in ((1, "done"), (2, "oom"), (64, "done")):
        recipe = TrainingRecipe(model="tiny", batch=batch, device="simulated")
        rows.append({"schema": 1, "kind": "cell", "key": cell_key(recipe), "status": status, "error": None, **step})
        rows[-1] |= {"recipe": recipe.to_json(), "oom": {"limit_bytes": 25232932864} if status == "oom" else None}
    (folder / "sweep").mkdir()
    (folder / "sweep" / "results.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """What a command prints to its console, at each width."""
    found = dict.fromkeys(WIDTHS, "")
    print_once = PlainConsole.print

    def print_at_all_widths(console: PlainConsole, *objects: object, **options: object) -> None:
        for width in WIDTHS:
            file = io.StringIO()
            print_once(PlainConsole(file=file, width=width), *objects, **options)
            found[width] += file.getvalue()

    # a pipe without COLUMNS gets as many columns as a table needs
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(PlainConsole, "print", print_at_all_widths)
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_every_value_of_a_command_is_whole_at_every_width(
    cells: list[str], printed: dict[int, str], monkeypatch: pytest.MonkeyPatch, results: Path, name: str
) -> None:
    monkeypatch.chdir(results)

    assert CliRunner().invoke(main, COMMANDS[name], catch_exceptions=False).exit_code == 0

    for width, text in printed.items():
        # lines to copy, after four spaces, are never wrapped
        assert all(len(line) <= width or line.startswith("    ") for line in text.splitlines())
        joined = "".join(text.split())
        for word in " ".join(cells).split():
            # a word longer than half a terminal is a path or a kernel, which is folded, at times within its column
            folded = (word[:end] in text and word[end:] in text for end in range(20, len(word)))
            assert word in text or (len(word) >= 28 and (word in joined or any(folded)))


def test_a_table_is_as_wide_as_before_after_a_narrow_terminal() -> None:
    def printed(table: WholeTable, width: int) -> str:
        file = io.StringIO()
        PlainConsole(file=file, width=width, force_terminal=True, color_system=None).print(table)
        return file.getvalue()

    table = groups_table("role", "MiB", figure_width=30)
    table.add_row("logits", "1,002.0")
    first, narrow, second = (printed(table, width) for width in (100, 24, 100))

    assert {"logits", "1,002.0"} <= set(narrow.split())
    assert max(map(len, narrow.splitlines())) <= 24
    assert second == first


def test_blocks_name_the_figure_that_they_are_about() -> None:
    file = io.StringIO()
    rows = [["10 to 20", "a" * 20], ["", "b" * 20]]
    table = listing_table("gap, us", "kernel" * 2, rows=rows)
    PlainConsole(file=file, width=24, force_terminal=True, color_system=None).print(table)

    assert [line.rstrip() for line in file.getvalue().splitlines() if "gap" in line] == 2 * ["gap, us: 10 to 20"]


def test_a_pipe_gets_as_many_columns_as_its_tables_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    file = io.StringIO()
    PlainConsole(file=file, width=40).print(listing_table("a", "b", rows=[["x" * 50, "y" * 50]]))

    assert f"{'x' * 50}   {'y' * 50}" in file.getvalue()
