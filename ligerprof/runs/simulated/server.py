"""Simulate recipes for the process that started this one: import what they need once, then fork per connection.

`python -m ligerprof.runs.simulated.server DESCRIPTOR...` receives one connection per process, each an open socket. A
process reads recipes as lines of JSON and answers each with a line: the reserved bytes, or an empty object if the
simulation raises an error. It ends when its connection is closed, also while it simulates.
"""

import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NoReturn

from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.simulated import simulate_step
from ligerprof.runs.simulators import read_line, reserved
from ligerprof.runs.sweep.imports import import_model
from ligerprof.snapshots.collector import collector_paused

_LOOK_SECONDS = 0.2


def main() -> None:
    """Serve the connections until each is closed."""
    connections = [socket.socket(fileno=int(word)) for word in sys.argv[1:]]
    _end_with(connections[0], [])
    recipe = read_line(connections[0])
    with collector_paused(), suppress(Exception):
        import_model(recipe)
    gc.freeze()
    forked: list[int] = []
    for connection in connections[1:]:
        if (process := os.fork()) == 0:
            _end_with(connection, [])
            _close_all_but(connection, connections)
            _serve(connection, read_line(connection))
        forked.append(process)
    _end_with(connections[0], forked)
    _close_all_but(connections[0], connections)
    _serve(connections[0], recipe, forked)


def _serve(connection: socket.socket, recipe: dict[str, Any] | None, forked: Sequence[int] = ()) -> NoReturn:
    while recipe is not None:
        # the other end may be closed
        with suppress(OSError):
            connection.sendall(json.dumps(_answer(recipe)).encode() + b"\n")
        recipe = read_line(connection)
    _end(forked)


def _answer(values: dict[str, Any]) -> dict[str, Any]:
    try:
        return asdict(reserved(simulate_step(TrainingRecipe.from_json(values), record=False)))
    except Exception:
        return {}


def _close_all_but(own: socket.socket, connections: Sequence[socket.socket]) -> None:
    for connection in connections:
        if connection is not own:
            connection.close()


def _end_with(connection: socket.socket, forked: Sequence[int]) -> None:
    """End this process, and those it forked, soon after the other end has closed the connection."""

    def look(_signal: int, _frame: object) -> None:
        with suppress(BlockingIOError):
            if not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                _end(forked)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _LOOK_SECONDS, _LOOK_SECONDS)


def _end(forked: Sequence[int]) -> NoReturn:
    """End without the second that Python takes to drop what was imported."""
    for process in forked:
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
    os._exit(0)


if __name__ == "__main__":
    main()
