import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ligerprof.cli.main import main
from tests.paths import RECORDINGS

RECORDING = str(RECORDINGS / "small-late.pickle.xz")


def test_page_is_written_beside_the_printed_report(tmp_path: Path) -> None:
    page = tmp_path / "peak.html"
    result = CliRunner().invoke(main, ["explain", RECORDING, "--html", str(page)])
    plain = CliRunner().invoke(main, ["explain", RECORDING])

    assert result.exit_code == 0
    assert result.stdout == plain.stdout
    assert result.stderr == f"wrote {page}\n"
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_json_stays_one_object(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["explain", RECORDING, "--html", str(tmp_path / "peak.html"), "--json"])
    assert json.loads(result.stdout)["peak_bytes"] == 1051144192


def test_page_that_is_there_stays_unless_forced(tmp_path: Path) -> None:
    page = tmp_path / "peak.html"
    page.write_text("mine")

    refused = CliRunner().invoke(main, ["explain", RECORDING, "--html", str(page)])

    assert (refused.exit_code, refused.stdout) == (1, "")
    assert refused.stderr == f"Error: {page}: exists. Add --force to overwrite it.\n"
    assert page.read_text() == "mine"

    assert CliRunner().invoke(main, ["explain", RECORDING, "--html", str(page), "--force"]).exit_code == 0
    assert page.read_text(encoding="utf-8") != "mine"


def test_page_is_written_before_the_limit_is_judged(tmp_path: Path) -> None:
    page = tmp_path / "peak.html"
    result = CliRunner().invoke(main, ["explain", RECORDING, "--html", str(page), "--max-peak", "1MiB"])
    assert (result.exit_code, page.exists()) == (3, True)


@pytest.mark.parametrize("place", ["a file/peak.html", "."])
def test_page_that_cannot_be_written_is_one_line(tmp_path: Path, place: str) -> None:
    (tmp_path / "a file").touch()
    result = CliRunner().invoke(main, ["explain", RECORDING, "--html", str(tmp_path / place)])
    assert result.exit_code in (1, 2)
    assert result.stderr.splitlines()[-1].startswith("Error: ")


def test_run_directory_is_read_by_its_snapshot(tmp_path: Path) -> None:
    run = tmp_path / "out"
    run.mkdir()
    (run / "snapshot.pickle").write_bytes(Path(RECORDING).read_bytes())
    result = CliRunner().invoke(main, ["explain", str(run), "--html", str(tmp_path / "peak.html")])
    assert result.exit_code == 0
