"""Simulate recipes for the process that started this one: import what they need once, then fork for each.

`python -m ligerprof.runs.simulated.server DESCRIPTOR...` receives one connection per process, each an open socket. A
process receives recipes, and sends what simulations say and return. It ends when its connection is closed, also while
it simulates.
"""

import gc
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from ligerprof.errors import LigerprofError
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.simulated.forks import end, end_with, received
from ligerprof.runs.sweep.imports import import_model
from ligerprof.snapshots.collector import collector_paused


def main() -> None:
    """Serve the connections that the arguments name."""
    serve([Connection(int(word)) for word in sys.argv[1:]])


def serve(connections: Sequence[Connection]) -> NoReturn:
    """Simulate for the other end of each connection, in a process per connection, until each is closed."""
    signal.set_wakeup_fd(-1)
    # of the terminal's keys, the process at the other end decides
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    first, *others = connections
    children: list[int] = []
    end_with(first, children)
    request = received(first)
    if request is None:
        end(children)
    with collector_paused(), suppress(Exception):
        import_model(request[0])
        from ligerprof.runs.simulated.rank import machine_for

        machine_for(TrainingRecipe.from_json(request[0]))
    gc.freeze()
    for connection in others:
        if (process := os.fork()) == 0:
            for other in connections:
                if other is not connection:
                    other.close()
            children = []
            end_with(connection, children)
            _serve(connection, received(connection), children)
        children.append(process)
        connection.close()
    _serve(first, request, children)


def _serve(connection: Connection, request: Any, children: list[int]) -> NoReturn:
    while request is not None:
        if (process := os.fork()) == 0:
            end_with(connection, [])
            _answer(connection, *request)
        children.append(process)
        _, status = os.waitpid(process, 0)
        children.remove(process)
        if status:
            why = "the process that simulates has ended without an answer; it may have run out of main memory."
            connection.send(("error", LigerprofError(f"simulate: {why}")))
        request = received(connection)
    end(children)


def _answer(connection: Connection, values: dict[str, Any], options: dict[str, bool]) -> NoReturn:
    def tell(text: str) -> None:
        connection.send(("progress", text))

    answer: tuple[str, object]
    with suppress(OSError):
        try:
            from ligerprof.runs.simulated.rank import simulate_here

            answer = "outcome", simulate_here(TrainingRecipe.from_json(values), tell, **options)
        except LigerprofError as error:
            answer = "error", error
        except BaseException as error:
            answer = "error", RuntimeError(f"{error!r} in the process that simulates:\n{traceback.format_exc()}")
        connection.send(answer)
    os._exit(0)


if __name__ == "__main__":
    main()
