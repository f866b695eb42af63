"""Simulate recipes for the process that started this one: import what they need once, then fork for each.

`python -m ligerprof.runs.simulated.server DESCRIPTOR...` receives one connection per process, each an open socket. A
process receives tasks, and sends what they say and return. It ends when its connection is closed, also while
it simulates.
"""

import gc
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from ligerprof.errors import LigerprofError
from ligerprof.gpus import DEFAULT_GPU, find_gpu
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.simulated.forks import end, end_with, received
from ligerprof.runs.sweep.fork_server import import_model
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
    _prepare(*request)
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
        _prepare(*request)
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


def _prepare(task: str, values: dict[str, Any] | None, *_others: object) -> None:
    """Import what a task needs, for its process and for later ones; what fails is left to the task, which says why."""
    with collector_paused(), suppress(Exception):
        from ligerprof.simulated_gpu.machine import install

        # bitsandbytes, which peft imports, has kernels for CUDA if there is a GPU by then
        install(find_gpu(DEFAULT_GPU))
        import_module(task.partition(":")[0])
        if values is not None:
            import_model(values)


def _answer(
    connection: Connection, task: str, values: dict[str, Any] | None, options: dict[str, Any], folder: str
) -> NoReturn:
    def tell(text: str) -> None:
        connection.send(("progress", text))

    answer: tuple[str, object]
    with suppress(OSError):
        try:
            # recipes name files by paths of their command's folder
            os.chdir(folder)
            module, _, name = task.partition(":")
            recipes = () if values is None else (TrainingRecipe.from_json(values),)
            answer = "outcome", getattr(import_module(module), name)(*recipes, tell, **options)
        except LigerprofError as error:
            answer = "error", error
        except BaseException as error:
            answer = "error", RuntimeError(f"{error!r} in the process that simulates:\n{traceback.format_exc()}")
        connection.send(answer)
    os._exit(0)


if __name__ == "__main__":
    main()
