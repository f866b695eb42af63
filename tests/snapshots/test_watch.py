"""A command stops when the analysis of its snapshots takes more memory or time than recordings of their sizes."""

import math
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from ligerprof.cli.main import main
from ligerprof.snapshots import watch
from ligerprof.snapshots.watch import LimitError, claim, watched
from tests.paths import RECORDINGS

SNAPSHOT = RECORDINGS / "small-own-all-python.pickle.xz"


@pytest.fixture(autouse=True)
def _check_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_SECONDS_BETWEEN_CHECKS", 0.001)
    monkeypatch.setattr(watch, "_SECONDS_PER_BYTE", 1e-10)


def busy(loops: int = 10**8) -> Iterator[int]:
    return iter(range(loops))


@watched()
def run(unpacked_bytes: int) -> None:
    claim("x.pickle").unpacked_bytes = unpacked_bytes
    sum(busy())


@pytest.mark.parametrize(
    ("limit", "value", "said"), [("_MEMORY_BYTES", -(2**40), "of memory"), ("_SECONDS", 0.01, "seconds")]
)
def test_an_analysis_over_a_limit_stops_wherever_it_is(
    limit: str, value: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, limit, value)

    with pytest.raises(LimitError, match=rf"^x\.pickle: the analysis of 5\.0 MiB takes more than .*{said}"):
        run(5 * 2**20)
    assert signal.getitimer(signal.ITIMER_PROF)[0] == 0


def test_commands_end_with_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(watch, "_SECONDS", 0.0)
    # analyses of recordings of tests are shared
    copy = str(shutil.copy(SNAPSHOT, tmp_path))

    for command in (["explain", copy], ["diff", copy, copy], ["compare", copy, copy]):
        result = CliRunner().invoke(main, command)
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
        assert "Was the file crafted?" in result.stderr
        assert result.stderr.count(SNAPSHOT.name) == 1


def test_nothing_is_counted_while_a_file_is_unpacked_or_before_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_SECONDS", 0.0)
    with watched():
        sum(busy(10**6))
        claim("x.pickle")
        sum(busy(10**6))


def test_each_file_adds_its_own_limit_and_a_large_one_may_take_any_time() -> None:
    with watched():
        small, larger, large = (claim(f"{name}.pickle") for name in "abc")
        small.unpacked_bytes, larger.unpacked_bytes, large.unpacked_bytes = 10**6, 5 * 10**7, 3 * 10**8
    assert small.memory_bytes < larger.memory_bytes < large.memory_bytes
    # recordings take a quarter of it: 1.2 GB of 280 MB
    assert large.memory_bytes >= 4 * 1.2e9
    assert watch._SECONDS < small.seconds < larger.seconds < large.seconds == math.inf


def test_a_long_analysis_says_so_once_on_a_terminal_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch, "_SECONDS", 0.01)
    monkeypatch.setattr(watch.sys.stderr, "isatty", lambda: True, raising=False)

    with watched():
        claim("x\x1b.pickle").unpacked_bytes = 10**9
        sum(busy(3 * 10**6))
    assert capsys.readouterr().err == "x\\x1b.pickle: analyzing 953.7 MiB; Ctrl-C ends it\n"


def test_a_machine_without_memory_is_not_a_crafted_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "available_bytes", lambda: 1.0)

    with pytest.raises(LimitError, match=r"needs more than the 1 B of memory .*free\. Record fewer"):
        run(5 * 2**20)


def test_other_threads_are_not_watched() -> None:
    def read() -> None:
        with watched():
            claim("x.pickle")

    before = signal.getsignal(signal.SIGPROF)
    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGPROF) is before
