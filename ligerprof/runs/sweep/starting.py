"""Start the commands of cells: measured ones as new processes, simulated ones as forks of a warm process.

Importing torch and transformers takes longer than a small simulated step. On Linux, a worker imports them once
per sweep and forks each simulated cell. On other systems fork is missing, or unsafe after these imports, and every cell
is a new process. So is every measured cell, because CUDA cannot be used in a forked process.
"""

import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ligerprof.recipe.categories import Device
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.outcome import Progress
from ligerprof.runs.simulated.server import import_model
from ligerprof.runs.simulated.worker import Worker
from ligerprof.runs.sweep.guard import GRACE_SECONDS, POLL_SECONDS

_STOP_SECONDS = 2 * GRACE_SECONDS
_HAS_FORKS = sys.platform == "linux"
_MODULES = (
    "ligerprof.cli.step",
    "ligerprof.reports.page.run",
    "ligerprof.reports.step",
    "ligerprof.reports.figures.memory",
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A cell's command: the words after `python`, and the files for its stdout and stderr."""

    words: tuple[str, ...]
    recipe: TrainingRecipe
    output: Path
    log: Path


class CellStarter:
    """Starts cells; a context manager that ends the worker.

    Args:
        folder: the sweep's folder, shown in the worker's command line.
        prepares: the function, as `module:name`, that imports what a simulated recipe needs.
    """

    def __init__(self, folder: Path, prepares: str = f"{__name__}:prepare") -> None:
        # forks have the command line of the worker: the folder shows to which sweep they belong
        self._folder, self._prepares = str(folder), prepares
        self._worker: Worker | None = None

    def __enter__(self) -> "CellStarter":
        return self

    def __exit__(self, *_raised: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def start(self, command: Command) -> "_NewProcess | _Fork":
        """Start a command.

        Raises:
            OSError: its files cannot be written, or the system cannot start another process.
        """
        if command.recipe.device is not Device.SIMULATED or not _HAS_FORKS:
            return _NewProcess(command)
        for file in (command.output, command.log):
            file.write_bytes(b"")
        if self._worker is None or not self._worker.is_ours():
            self._close()
            self._worker = Worker(quiet=True, words=(self._folder,))
        connection = self._worker.start(
            f"{__name__}:run_cell",
            command.recipe,
            prepares=self._prepares,
            words=command.words,
            output=str(command.output.absolute()),
            log=str(command.log.absolute()),
        )
        return _Fork(self._worker, connection)


def prepare(values: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Import the modules of a recipe, given as its JSON; a step reports those that fail, and `options` has the log."""
    _print_to(options["log"], 1, 2)
    for name in _MODULES:
        with suppress(Exception):
            import_module(name)
    with suppress(Exception):
        import_model(values)
    sys.stdout.flush()
    sys.stderr.flush()
    _print_to(os.devnull, 1, 2)


def _print_to(path: str, *descriptors: int) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    for descriptor in descriptors:
        os.dup2(file, descriptor)
    os.close(file)


def run_cell(_recipe: TrainingRecipe, tell: Progress, *, words: tuple[str, ...], output: str, log: str) -> int:
    """Run a cell's command in this process, which was forked for it and ends afterwards; returns the exit code."""
    # what it starts ends with it
    os.setsid()
    tell(str(os.getpid()))
    _print_to(output, 1)
    _print_to(log, 2)
    _, module, *arguments = words
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


class _NewProcess:
    """A command in a new process, which a guard ends with this one."""

    def __init__(self, command: Command) -> None:
        python = [sys.executable, *command.words]
        with command.output.open("wb") as output, command.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ligerprof.runs.sweep.guard", *python],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=log,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """The exit code, negative or 128 + N if signal N ended it; None while it runs."""
        code = self._process.poll()
        if code is not None:
            self._close()
        return code

    def stop(self) -> None:
        """End it with all processes that it started."""
        self._close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        self._process.kill()
        self._process.wait()

    def _close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()


class _Fork:
    """A command in a fork of a worker, which says its process id and then its exit code."""

    def __init__(self, worker: Worker, answers: Connection) -> None:
        self._worker, self._answers = worker, answers
        self._process: int | None = None
        self._code: int | None = None

    def poll(self) -> int | None:
        while self._code is None and self._answers.poll():
            try:
                kind, said = self._answers.recv()
            except (EOFError, OSError):
                # killed, or the worker ended while it imported
                self._code = self._worker.exit_code() if self._process is None else -signal.SIGKILL
            else:
                if kind == "progress":
                    self._process = int(said)
                else:
                    self._code = said if kind == "outcome" else 1
        if self._code is not None:
            self._answers.close()
        return self._code

    def stop(self) -> None:
        if self._code is None:
            with socket.socket(fileno=os.dup(self._answers.fileno())) as answers, suppress(OSError):
                answers.shutdown(socket.SHUT_WR)
        give_up = time.monotonic() + _STOP_SECONDS
        while self.poll() is None and self._process is not None:
            if time.monotonic() > give_up:
                with suppress(ProcessLookupError):
                    os.killpg(self._process, signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        if self._code is None:
            # a worker that is still importing does not start a cell that nobody waits for
            self._code = -signal.SIGTERM
            self._answers.close()
