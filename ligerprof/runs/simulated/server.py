"""The process that runs tasks on a simulated GPU: it imports what they need once, and forks a process for each.

`python -m ligerprof.runs.simulated.server DESCRIPTOR` receives one connection per task from an open Unix socket, and
ends when that is closed. A task's process sends what the task says and returns, and ends when its connection is closed.
"""

import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from ligerprof.errors import LigerprofError
from ligerprof.gpus import DEFAULT_GPU, find_gpu
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.snapshots.collector import collector_paused

_LOOK_SECONDS = 0.2


def main() -> None:
    """Serve the socket that the argument names."""
    serve(socket.socket(fileno=int(sys.argv[1])))


def serve(tasks: socket.socket) -> NoReturn:
    """Run the tasks whose connections arrive, each in a fork of this process, until the socket is closed."""
    signal.set_wakeup_fd(-1)
    # of the terminal's keys, the process at the other end decides
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # also while an import hangs
    end_with(tasks.fileno())
    while True:
        message, files, _, _ = socket.recv_fds(tasks, 1, 1)
        if not message:
            os._exit(0)
        connection = Connection(files[0])
        request = received(connection)
        if request is not None:
            _prepare(*request)
            # collections in forks do not touch, and so copy, the pages of what was imported
            gc.freeze()
            # where no process can start, the other end finds its connection closed
            with suppress(OSError):
                if os.fork() == 0:
                    tasks.close()
                    end_with(connection.fileno())
                    _answer(connection, *request)
        connection.close()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass


def _load(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), function)
    return found


def _prepare(
    task: str, values: dict[str, Any] | None, options: dict[str, Any], _folder: str, prepares: str | None
) -> None:
    """Import what a task needs, for its process and for later ones; what fails is left to the task, which says why."""
    with collector_paused(), suppress(Exception):
        if prepares is not None:
            _load(prepares)(values, options)
            return
        from ligerprof.simulated_gpu.machine import install

        # bitsandbytes, which peft imports, has kernels for CUDA if there is a GPU by then
        install(find_gpu(DEFAULT_GPU))
        _load(task)
        if values is not None:
            import_model(values)


def import_model(values: Mapping[str, Any]) -> None:
    """Import the classes of a recipe's model, and of its adapters; the recipe is given as its JSON."""
    from ligerprof.runs.training import find_architecture

    recipe = TrainingRecipe.from_json(values)
    find_architecture(recipe.spec)
    if recipe.lora is not None or recipe.qlora is not None:
        import_module("peft")


def _answer(
    connection: Connection, task: str, values: dict[str, Any] | None, options: dict[str, Any], folder: str, _: object
) -> NoReturn:
    def tell(text: str) -> None:
        connection.send(("progress", text))

    answer: tuple[str, object]
    with suppress(OSError):
        try:
            # recipes name files by paths of their command's folder
            os.chdir(folder)
            recipes = () if values is None else (TrainingRecipe.from_json(values),)
            answer = "outcome", _load(task)(*recipes, tell, **options)
        except LigerprofError as error:
            answer = "error", error
        except BaseException as error:
            answer = "error", RuntimeError(f"{error!r} in the process that simulates:\n{traceback.format_exc()}")
        connection.send(answer)
    os._exit(0)


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
        end_with(theirs.fileno())
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


def end_with(descriptor: int) -> None:
    """End this process soon after the other end has closed a socket, or its parent has ended."""
    look_at, parent = socket.socket(fileno=os.dup(descriptor)), os.getppid()

    def look(_signal: int, _frame: object) -> None:
        with suppress(BlockingIOError):
            if os.getppid() == parent and look_at.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                return
            if os.getpgrp() == os.getpid():
                # what it started itself, too
                os.killpg(0, signal.SIGKILL)
            # without the second that Python takes to drop what was imported
            os._exit(0)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _LOOK_SECONDS, _LOOK_SECONDS)


if __name__ == "__main__":
    main()
