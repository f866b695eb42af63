import io
import sys

import pytest

from ligerprof.cli.output import about_left, stages, time_left


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_one_line_per_stage(capsys: pytest.CaptureFixture[str]) -> None:
    with stages(2) as progress:
        progress("first")
        progress("second\x1b[31m")

    assert capsys.readouterr().err == "first\nsecond\\x1b[31m\n"


def test_a_terminal_shows_the_stage_and_is_clean_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with stages(2) as progress:
        progress("first [bold]")
        progress("second")

    printed = terminal.getvalue()
    assert "second" in printed
    # the cursor goes back, and the line is erased
    assert printed.endswith("\x1b[2K")


def test_the_time_left_follows_from_the_stages_that_are_done() -> None:
    assert time_left(0, 4, 0.1) == "0 of 4 done: "
    assert time_left(1, 4, 5.0) == "1 of 4 done, 15 s left: "
    assert time_left(4, 4, 5.0) == "4 of 4 done, 0 s left: "
    assert (time_left(0, None, 0.0), time_left(3, None, 9.0)) == ("", "3 done, now ")


def test_the_time_left_follows_from_the_number_that_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    assert about_left(0, 5, 3.0) == about_left(5, 0, 3.0) == ""
    assert about_left(4, 6, 2.0) == "about 3 s left: "

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with stages() as progress:
        progress("first")
        progress.remaining(3)
        progress.remaining(2)
        progress("second")
    assert "s left: second" in terminal.getvalue()


def test_attempts_are_counted_where_the_last_one_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with stages() as progress:
        progress("as given")
        progress.attempt(3, 12)
        progress("simulating")
    assert "change 3 of at most 12: simulating" in terminal.getvalue()
