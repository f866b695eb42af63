"""A command stops when the analysis of its snapshots takes more memory or time than recordings of their sizes."""

import signal
import threading
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from ligerprof.cli.main import main
from ligerprof.snapshots import watch
from ligerprof.snapshots.pickles.allowance import LimitError
from ligerprof.snapshots.watch import claim, watched
from tests.paths import RECORDINGS

SNAPSHOT = RECORDINGS / "small-own-all-python.pickle.xz"


@pytest.fixture(autouse=True)
def _check_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_SECONDS_BETWEEN_CHECKS", 0.001)


def busy(loops: int = 10**8) -> Iterator[int]:
    return iter(range(loops))


@watched()
def run(unpacked_bytes: int) -> None:
    claim("x.pickle", 100).unpacked_bytes = unpacked_bytes
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


def test_commands_end_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_SECONDS", 0.0)

    for command in (
        ["explain", str(SNAPSHOT)],
        ["diff", str(SNAPSHOT), str(SNAPSHOT)],
        ["compare", str(SNAPSHOT), str(SNAPSHOT)],
    ):
        result = CliRunner().invoke(main, command)
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
        assert "Was the file crafted?" in result.stderr
        assert result.stderr.count(SNAPSHOT.name) == 1


def test_nothing_is_counted_while_a_file_is_unpacked_or_before_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_SECONDS", 0.0)
    with watched():
        sum(busy(10**6))
        claim("x.pickle", 100)
        sum(busy(10**6))


def test_several_files_may_take_what_each_may_take() -> None:
    with watched():
        claims = [claim("a.pickle", 10**6), claim("b.pickle", 2 * 10**7)]
        for each in claims:
            each.unpacked_bytes = 10**8
        # however far 10 MB unpack, they may take 10 seconds
        unpacking_far = claim("c.pickle.xz", 10**7)
        unpacking_far.unpacked_bytes = 10**9
        plain = claim("d.pickle", 2 * 10**7)
        plain.unpacked_bytes = 2 * 10**7
    assert claims[1].memory_bytes > claims[0].memory_bytes > 3 * 10**8
    assert claims[0].seconds == unpacking_far.seconds == watch._SECONDS < plain.seconds < claims[1].seconds


def test_the_error_about_a_compressed_file_says_that_larger_files_may_take_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "_SECONDS", 0.01)

    with pytest.raises(LimitError, match="If you trust it, decompress it "):
        run(2**20)


def test_other_threads_are_not_watched() -> None:
    def read() -> None:
        with watched():
            claim("x.pickle", 1)

    before = signal.getsignal(signal.SIGPROF)
    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGPROF) is before
