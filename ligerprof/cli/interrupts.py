"""Ctrl-C: the process ends with exit code 130 within a second, wherever it is.

Python raises KeyboardInterrupt in the main thread between two of its instructions. That is too late while torch's
autograd runs in another thread, and code that the main thread runs may catch it. A thread therefore waits for the
signal, gives the main thread a moment to clean up, and ends the process.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

EXIT_CODE = 128 + signal.SIGINT
# how long the main thread may clean up
_grace_seconds = [0.4]
MESSAGE = "\ninterrupted"
_received = threading.Event()
_clean_ups: list[Callable[[], object]] = []


def received() -> bool:
    """Whether this process has received SIGINT since `watch`."""
    return _received.is_set()


def at_end(clean_up: Callable[[], object]) -> None:
    """Call a function if an interrupt ends the process before the main thread has cleaned up."""
    _clean_ups.append(clean_up)


def take_longer(seconds: float) -> None:
    """Give the main thread so long to end other processes and to show what is known."""
    _grace_seconds[0] = seconds


def watch() -> None:
    """End the process soon after SIGINT; nothing happens if the signal is ignored, as under nohup."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    waiting, arriving = os.pipe()
    os.set_blocking(arriving, False)
    signal.set_wakeup_fd(arriving, warn_on_full_buffer=False)
    sys.unraisablehook = _without_interrupts(sys.unraisablehook)
    threading.Thread(target=_end_on_interrupt, args=(waiting,), daemon=True).start()


def _end_on_interrupt(waiting: int) -> None:
    while (arrived := os.read(waiting, 1)) and arrived[0] != signal.SIGINT:
        pass
    _received.set()
    time.sleep(_grace_seconds[0])
    _end()


def _end() -> NoReturn:
    for clean_up in _clean_ups:
        clean_up()
    os._exit(EXIT_CODE)


def _without_interrupts(hook: Any) -> Any:
    """The hook for exceptions that Python cannot raise, without those of an interrupt."""

    def report(unraisable: Any) -> None:
        if not received() and not issubclass(unraisable.exc_type, KeyboardInterrupt):
            hook(unraisable)

    return report
