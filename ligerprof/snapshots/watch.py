"""Stop a command that takes more processor time or memory than recordings of its files' sizes, as crafted files do."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from ligerprof.snapshots.pickles.allowance import LARGE_BYTES, MEMORY_PER_STORED_BYTE, LimitError, resident_bytes
from ligerprof.units import MIB, format_bytes

# recordings take a quarter to a half of this memory, and a tenth to a third of this time on a machine of 2024
_MEMORY_BYTES = 256 * MIB
_MEMORY_PER_UNPACKED_BYTE = 3
# a command stops before the limit, because memory grows between two checks
_STOPPING_SHARE = 0.95
_SECONDS = 10.0
_SECONDS_PER_STORED_BYTE = 300e-9
# such a byte unpacks to a hundred at most
_SECONDS_PER_PACKED_BYTE = 2300e-9
_SECONDS_BETWEEN_CHECKS = 0.02
# what a command takes before it reads anything; a larger process does more than one command
_OWN_BYTES = 64 * MIB


class AnalysisLimitError(LimitError):
    """A command took more time or memory than any recording of its files' sizes; names the file."""


@dataclass(kw_only=True, slots=True, eq=False)
class Claim:
    """A snapshot that a command reads; its unpacked size is None while it is unpacked."""

    source: str
    stored_bytes: int
    unpacked_bytes: int | None = None

    @property
    def memory_bytes(self) -> int:
        """The memory that the command may take for it."""
        beyond_bytes = max(0, self.stored_bytes - LARGE_BYTES)
        unpacked_bytes = self.unpacked_bytes or 0
        return _MEMORY_BYTES + _MEMORY_PER_UNPACKED_BYTE * unpacked_bytes + MEMORY_PER_STORED_BYTE * beyond_bytes

    @property
    def seconds(self) -> float:
        """The processor time that the command may take for it; 10 seconds for up to 10 MB, however far they unpack."""
        per_byte = _SECONDS_PER_PACKED_BYTE if self.is_packed else _SECONDS_PER_STORED_BYTE
        return _SECONDS + per_byte * max(0, self.stored_bytes - LARGE_BYTES)

    @property
    def is_packed(self) -> bool:
        """Whether it is compressed."""
        return (self.unpacked_bytes or 0) > self.stored_bytes


class _Watch:
    """The snapshots that the running command has read, and what it took before them."""

    def __init__(self) -> None:
        self.claims: list[Claim] = []
        self.started = time.process_time()
        self.before_bytes = max(0, resident_bytes() - _OWN_BYTES)

    def check(self, _number: int, _frame: FrameType | None) -> None:
        """Raise an AnalysisLimitError if the time or the memory is used up."""
        if not self.claims or any(each.unpacked_bytes is None for each in self.claims):
            return
        most_bytes, most_seconds = (
            sum(each.memory_bytes for each in self.claims),
            sum(each.seconds for each in self.claims),
        )
        if resident_bytes() - self.before_bytes > _STOPPING_SHARE * most_bytes:
            self._stop(f"{format_bytes(most_bytes)} of memory", "")
        if time.process_time() - self.started > most_seconds:
            has_packed = any(each.is_packed for each in self.claims)
            # a large recording that compresses very well may take as long
            self._stop(f"{most_seconds:.0f} seconds", "decompress it (larger files may take longer), or " * has_packed)

    def _stop(self, limit: str, remedy: str) -> None:
        last = self.claims[-1]
        self.claims.clear()
        raise AnalysisLimitError(
            f"{last.source}: the analysis of {format_bytes(last.unpacked_bytes or 0)} takes more than {limit}, which"
            f" hardly any recording of this size needs. Was the file crafted? If you trust it, {remedy}use"
            " ligerprof.explain() in Python, which has no such limit."
        )


_running: list[_Watch] = []


def claim(source: str, stored_bytes: int) -> Claim:
    """Announce a snapshot that is read next."""
    claimed = Claim(source=source, stored_bytes=stored_bytes)
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
