"""The time and memory that reading a snapshot may take: of its pickle, and of a whole command."""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from types import FrameType

from ligerprof.errors import SnapshotFormatError
from ligerprof.text import printable
from ligerprof.units import MIB, format_bytes

# several times what recordings take; small pickles have limits that keep crafted files short, larger ones may take long
SMALL_BYTES = 64 * MIB
_LOADING_SECONDS = 5.0
_LOADING_BYTES = 160 * MIB
_MEMORY_PER_SMALL_BYTE = 2
# recordings take up to four bytes for each
MEMORY_PER_BYTE = 16
_SECONDS_PER_BYTE = 1e-6
_STATM, _STATM_BYTES = "/proc/self/statm", 256
_MEMINFO, _MEMINFO_BYTES, _AVAILABLE = "/proc/meminfo", 256, re.compile(rb"MemAvailable: *(\d+) kB")


class LimitError(SnapshotFormatError):
    """Loading took more time or memory than any recording of its size."""


class Allowance:
    """Counts the processor time and memory of this process since it was made.

    Args:
        unpacked_bytes: size of the pickle.
    """

    def __init__(self, unpacked_bytes: int) -> None:
        beyond_bytes = max(0, unpacked_bytes - SMALL_BYTES)
        self._seconds = most_seconds(_LOADING_SECONDS, unpacked_bytes)
        self._memory_bytes = (
            _LOADING_BYTES + _MEMORY_PER_SMALL_BYTE * (unpacked_bytes - beyond_bytes) + MEMORY_PER_BYTE * beyond_bytes
        )
        self._unpacked_bytes = unpacked_bytes
        self._started = time.process_time()
        self._memory_before = resident_bytes()

    def check(self) -> None:
        """Raise a LimitError if either is used up."""
        if time.process_time() - self._started > self._seconds:
            self._stop(f"{self._seconds:.0f} seconds")
        if resident_bytes() - self._memory_before > self._memory_bytes:
            self._stop(f"{format_bytes(self._memory_bytes)} of memory")

    def _stop(self, limit: str) -> None:
        raise LimitError(
            f"loading {format_bytes(self._unpacked_bytes)} takes more than {limit}, which no recording of this size"
            " needs. Was the file crafted?"
        )


def most_seconds(least: float, unpacked_bytes: int) -> float:
    """The processor time that a pickle may take; a large one may take any."""
    return least + _SECONDS_PER_BYTE * unpacked_bytes if unpacked_bytes <= SMALL_BYTES else inf


def resident_bytes() -> int:
    """Memory of this process; 0 where the system does not say."""
    try:
        # a command asks for it many times, and opening a Path takes several times as long
        file = os.open(_STATM, os.O_RDONLY)
        try:
            return int(os.read(file, _STATM_BYTES).split()[1]) * os.sysconf("SC_PAGE_SIZE")
        finally:
            os.close(file)
    except OSError:
        return 0


def available_bytes() -> float:
    """Memory that the system can give; infinite where it does not say."""
    try:
        with open(_MEMINFO, "rb", buffering=0) as file:  # noqa: PTH123 - as above
            found = _AVAILABLE.search(file.read(_MEMINFO_BYTES))
    except OSError:
        return inf
    return inf if found is None else int(found[1]) * 1024


# recordings take a quarter of this memory and a tenth of this time on a machine of 2024
_MEMORY_BYTES = 256 * MIB
_SECONDS = 10.0
# a command stops before the limit, because memory grows between two checks
_STOPPING_SHARE = 0.95
_SECONDS_BETWEEN_CHECKS = 0.02
# what a command takes before it reads anything; a larger process does more than one command
_OWN_BYTES = 64 * MIB


class AnalysisLimitError(LimitError):
    """A command took more time or memory than any recording of its files' sizes; names the file."""


@dataclass(kw_only=True, slots=True, eq=False)
class Claim:
    """A snapshot that a command reads; its unpacked size is None while it is unpacked."""

    source: str
    unpacked_bytes: int | None = None

    @property
    def memory_bytes(self) -> int:
        """The memory that the command may take for it."""
        return _MEMORY_BYTES + MEMORY_PER_BYTE * (self.unpacked_bytes or 0)

    @property
    def seconds(self) -> float:
        """The processor time that the command may take for it, as long for a compressed file as for its content."""
        return most_seconds(_SECONDS, self.unpacked_bytes or 0)


class _Watch:
    """The snapshots that the running command has read, and what it took before them."""

    def __init__(self) -> None:
        self.claims: list[Claim] = []
        self.started = time.process_time()
        self.before_bytes = max(0, resident_bytes() - _OWN_BYTES)
        self.available_bytes = available_bytes()
        self.said = False

    def check(self, _number: int, _frame: FrameType | None) -> None:
        """Raise an AnalysisLimitError if the time or the memory is used up."""
        if not self.claims or any(each.unpacked_bytes is None for each in self.claims):
            return
        most_bytes, longest = (
            sum(each.memory_bytes for each in self.claims),
            sum(each.seconds for each in self.claims),
        )
        taken_bytes, seconds = resident_bytes() - self.before_bytes, time.process_time() - self.started
        if taken_bytes > _STOPPING_SHARE * self.available_bytes:
            self._stop(
                f"needs more than the {format_bytes(int(self.available_bytes))} of memory that this machine has free."
                " Record fewer steps, or read it on a larger machine."
            )
        for is_over, limit in (
            (taken_bytes > _STOPPING_SHARE * most_bytes, f"{format_bytes(most_bytes)} of memory"),
            (seconds > longest, f"{longest:.0f} seconds"),
        ):
            if is_over:
                self._stop(
                    f"takes more than {limit}, which no recording of this size needs. Was the file crafted? If you"
                    " trust it, use ligerprof.explain() in Python, which has no such limit."
                )
        if seconds > _SECONDS and not self.said:
            self.said = True
            if sys.stderr.isatty():
                last = self.claims[-1]
                size = format_bytes(last.unpacked_bytes or 0)
                sys.stderr.write(f"{printable(last.source)}: analyzing {size}; Ctrl-C ends it\n")

    def _stop(self, problem: str) -> None:
        last = self.claims[-1]
        self.claims.clear()
        raise AnalysisLimitError(f"{last.source}: the analysis of {format_bytes(last.unpacked_bytes or 0)} {problem}")


_running: list[_Watch] = []


def claim(source: str) -> Claim:
    """Announce a snapshot that is read next."""
    claimed = Claim(source=source)
    for watch in _running:
        watch.claims.append(claimed)
    return claimed


@contextmanager
def watched() -> Iterator[None]:
    """Raise an AnalysisLimitError as soon as reading and analyzing snapshots exceeds its limit of time or memory.

    For commands; it needs the main thread, and does nothing in others.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getitimer(signal.ITIMER_PROF)[0]:
        yield
        return
    watch = _Watch()
    before = signal.signal(signal.SIGPROF, watch.check)
    _running.append(watch)
    # the timer counts the processor time of this process
    signal.setitimer(signal.ITIMER_PROF, _SECONDS_BETWEEN_CHECKS, _SECONDS_BETWEEN_CHECKS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        _running.remove(watch)
