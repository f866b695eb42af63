"""Processes that simulations fork: they end when nobody waits for their answer."""

import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn

_LOOK_SECONDS = 0.2


def received(connection: Connection) -> Any:
    """What the other end sends; None if it has closed the connection."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        return None


def apart(function: Callable[[], Any]) -> Callable[[], Any]:
    """A process in which a function can run: the returned function runs it there, and gives its result.

    Raises:
        the exception of the function.
    """
    ours, theirs = (Connection(end.detach()) for end in socket.socketpair())
    if os.fork() == 0:
        ours.close()
        end_with(theirs, [])
        if received(theirs) is not None:
            try:
                answer = "outcome", function()
            except Exception as error:
                answer = "error", error
            theirs.send(answer)
        os._exit(0)
    theirs.close()

    def run() -> Any:
        ours.send(())
        kind, value = ours.recv()
        if kind == "error":
            raise value
        return value

    return run


def end_with(connection: Connection, children: list[int]) -> None:
    """End this process, and those it forked, soon after the other end has closed the connection."""
    look_at = socket.socket(fileno=os.dup(connection.fileno()))

    def look(_signal: int, _frame: object) -> None:
        with suppress(BlockingIOError):
            if not look_at.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                end(children)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _LOOK_SECONDS, _LOOK_SECONDS)


def end(children: Sequence[int]) -> NoReturn:
    """End without the second that Python takes to drop what was imported."""
    for process in children:
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
    os._exit(0)
