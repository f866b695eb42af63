"""Messages of a recorded process, which shares its stderr with the program, and its progress if it is simulated."""

import sys
import time

from ligerprof.text import printable


def say(text: str) -> None:
    """Print one line to stderr, if there is one."""
    if sys.stderr is not None:
        print(f"ligerprof: {printable(text)}", file=sys.stderr, flush=True)  # noqa: T201 - no click in this process


_SECONDS_ON_TERMINAL, _SECONDS_ELSEWHERE = 3, 60


class Progress:
    """Says which step begins; the time that is left is known if the last step is.

    Args:
        last: the step after which the command ends, None if that is up to the command.
    """

    def __init__(self, last: int | None) -> None:
        self._last = last
        self._started = self._said = time.monotonic()
        # when the first step began
        self._began: float | None = None
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._pause = _SECONDS_ON_TERMINAL if is_terminal else _SECONDS_ELSEWHERE

    def begin(self, step: int) -> None:
        """Note that a step begins, and say so if nothing was said for a while."""
        now = time.monotonic()
        if self._began is None:
            self._began = now
        if now - self._said < self._pause or (self._last is not None and step > self._last):
            return
        self._said = now
        of, left = "", ""
        if self._last is not None:
            of = f" of {self._last}"
            if step > 1:
                left = f", about {(now - self._began) / (step - 1) * (self._last - step + 1):.0f} s left"
        say(f"simulating step {step}{of}, {now - self._started:.0f} s so far{left}")
