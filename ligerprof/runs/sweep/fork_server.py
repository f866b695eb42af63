"""A process that imports what simulated steps need once, and forks a cell for each command that it receives.

`python -m ligerprof.runs.sweep.fork_server FOLDER MODULE` reads requests from the Unix socket that is its stdin, and
ends when that is closed. FOLDER shows in lists of processes to which sweep it belongs; MODULE has a function `prepare`,
which imports what a recipe needs.

A request is five files: a JSON object with the words of a command after `python` and the recipe that it simulates; the
command's guarded stdin, its stdout, its stderr, and a pipe for the answer. The answer is the process id of the cell's
guard, then the exit code, each in a line of its own.

A forked cell does what a new process does: it has its own session, is ended when its stdin is closed, and runs the
command from its start. The server only imports. It never runs a command, and has one thread.
"""

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ligerprof.runs.sweep.guard import POLL_SECONDS, guard

_MODULES = (
    "ligerprof.cli.step",
    "ligerprof.reports.page.run",
    "ligerprof.reports.figures.memory",
    "ligerprof.reports.step",
    "ligerprof.runs.measured.ranks",
    "ligerprof.runs.step",
    "ligerprof.runs.simulated",
    "ligerprof.kernels.patching.apply",
    "transformers.masking_utils",
    "torch.utils.tensorboard",
    "matplotlib.pyplot",
    "matplotlib.backends.backend_svg",
    "matplotlib.backends.backend_agg",
)


def prepare(values: Mapping[str, Any]) -> None:
    """Import the modules of a recipe, given as its JSON; a module that fails is left to the step, which reports why."""
    for name in _MODULES:
        with suppress(Exception):
            import_module(name)
    with suppress(Exception):
        import_model(values)


def import_model(values: Mapping[str, Any]) -> None:
    """Import the classes of a recipe's model, and of its adapters."""
    from ligerprof.recipe.training import TrainingRecipe
    from ligerprof.runs.training import find_architecture

    recipe = TrainingRecipe.from_json(values)
    find_architecture(recipe.spec)
    if recipe.lora is not None or recipe.qlora is not None:
        import_module("peft")


# numpy's BLAS starts a thread per core when it is imported, and a process with threads must not fork
_THREADS = "OPENBLAS_NUM_THREADS"
_FILES = 5
_LOOK_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CellRequest:
    """A command to run: its words after `python`, its recipe, and its files."""

    words: list[str]
    recipe: dict[str, Any]
    stdin: int
    output: int
    log: int
    answer: int

    @property
    def files(self) -> tuple[int, ...]:
        """All of its files, as descriptors of this process."""
        return self.stdin, self.output, self.log, self.answer


def main() -> None:
    """Serve until stdin is closed; in a forked cell, return from there and run the command."""
    server = socket.socket(fileno=os.dup(0))
    _replace(os.open(os.devnull, os.O_RDWR), 0, 1, 2)
    words = _serve(server, sys.argv[-1])
    if words is None:
        # without the second that Python takes to drop what was imported
        os._exit(0)
    _run(words)


def _serve(server: socket.socket, module: str) -> list[str] | None:
    """Fork a cell per request.

    Returns:
        None in the server, when its stdin is closed; in a cell, the words of its command.
    """
    threads = os.environ.get(_THREADS)
    os.environ[_THREADS] = "1"
    while (request := _receive(server)) is not None:
        _reap()
        if not _is_cancelled(request):
            _prepare(request, module)
        if not _is_cancelled(request) and _fork(request) == 0:
            server.close()
            if threads is None:
                del os.environ[_THREADS]
            else:
                os.environ[_THREADS] = threads
            return _start_cell(request)
        for file in request.files:
            os.close(file)
    _reap()
    return None


def _reap() -> None:
    """Wait for the cells that have ended, so that their CPU time counts as this process's."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def _fork(request: CellRequest) -> int | None:
    """As os.fork; None if it fails, which the request's log and answer show."""
    try:
        return os.fork()
    except OSError as error:
        os.write(request.log, f"Error: cannot start the cell: {error.strerror}\n".encode())
        os.write(request.answer, b"0\n1\n")
        return None


def _receive(server: socket.socket) -> CellRequest | None:
    message, files, _, _ = socket.recv_fds(server, 1, _FILES)
    if not message:
        return None
    content, stdin, output, log, answer = files
    with os.fdopen(content, encoding="utf-8") as file:
        return CellRequest(**json.load(file), stdin=stdin, output=output, log=log, answer=answer)


def _is_cancelled(request: CellRequest) -> bool:
    """Whether the sweep has closed the cell's stdin, or has ended."""
    return bool(select.select([request.stdin], [], [], 0)[0])


def _prepare(request: CellRequest, module: str) -> None:
    """Import what the request's recipe needs; what imports print goes to its log."""
    null = os.dup(2)
    _replace(os.dup(request.log), 1, 2)
    with _ended_with(os.getppid()):
        importlib.import_module(module).prepare(request.recipe)
    sys.stdout.flush()
    sys.stderr.flush()
    _replace(null, 1, 2)
    # garbage collection in cells does not touch, and so copy, the pages of what was imported
    gc.freeze()


@contextmanager
def _ended_with(parent: int) -> Iterator[None]:
    """End this process if its parent ends, even while an import hangs."""

    def look(_signal: int, _frame: object) -> None:
        if os.getppid() != parent:
            os._exit(0)

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _LOOK_SECONDS, _LOOK_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _start_cell(request: CellRequest) -> list[str]:
    """Become the cell's guard, which never returns, and fork the process of the command.

    Returns:
        In the process of the command, its words.
    """
    os.setsid()
    os.dup2(request.stdin, 0)
    os.dup2(request.output, 1)
    os.dup2(request.log, 2)
    os.write(request.answer, b"%d\n" % os.getpid())
    process = _fork(request)
    if process == 0:
        for file in request.files:
            os.close(file)
        _replace(os.open(os.devnull, os.O_RDONLY), 0)
        return request.words
    if process is not None:
        os.write(request.answer, b"%d\n" % guard(_Forked(process)))
    os._exit(0)


class _Forked:
    """A forked child as the guard sees it."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            ended, status = os.waitpid(self._process, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if ended else None
        return self._code

    def wait(self, timeout: float) -> int:
        give_up = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > give_up:
                raise subprocess.TimeoutExpired("cell", timeout)
            time.sleep(POLL_SECONDS)
        return code


def _run(words: Sequence[str]) -> None:
    option, module, *arguments = words
    assert option == "-m"
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _replace(file: int, *by: int) -> None:
    """Make descriptors refer to a file, and close its own."""
    for descriptor in by:
        os.dup2(file, descriptor)
    os.close(file)


if __name__ == "__main__":
    main()
