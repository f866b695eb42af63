"""Stop a command whose small file takes more time or memory than recordings do, and one that needs all memory."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from ligerprof.snapshots.pickles.allowance import (
    MEMORY_PER_BYTE,
    LimitError,
    available_bytes,
    most_seconds,
    resident_bytes,
)
from ligerprof.text import printable
from ligerprof.units import MIB, format_bytes

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
