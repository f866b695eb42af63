"""The other end of `server.py`: run a task in a process of its own, whose `cuda` is the simulated GPU.

A process whose `cuda` is the simulated GPU has no way back, and so is never that of a user's program. It is a new
one, or a fork of the command line's own: autograd's threads, which start with the first backward pass, are not
in a fork.
"""

import atexit
import os
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ligerprof.errors import LigerprofError
from ligerprof.own_process import is_own
from ligerprof.recipe.conflicts import require_packages, require_supported
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.recipe.usable_memory import find_limit
from ligerprof.runs.outcome import Progress, StepOutcome, silent
from ligerprof.snapshots.collector import collector_paused

SERVER = "ligerprof.runs.simulated.server"
# the task that returns the StepOutcome of a recipe
SIMULATE = "ligerprof.runs.simulated.rank:simulate_here"
# numpy's BLAS starts a thread per core when it is imported, and a process with threads must not fork
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
_END_SECONDS = 1.0


class Worker:
    """A server of this process's own.

    Args:
        quiet: whether it is a new process that prints nothing, not a fork.
        words: more words of its command line, which show in lists of processes.

    Raises:
        OSError: the system cannot start another process.
    """

    def __init__(self, *, quiet: bool = False, server: str = SERVER, words: tuple[str, ...] = ()) -> None:
        self._owner = os.getpid()
        self._tasks, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process: subprocess.Popen[bytes] | None = None
        with theirs:
            if is_own() and not quiet:
                self._fork(theirs)
                return
            self._process = subprocess.Popen(
                [sys.executable, "-m", server, str(theirs.fileno()), *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL if quiet else None,
                pass_fds=[theirs.fileno()],
                start_new_session=quiet,
                env={**os.environ, **_ONE_THREAD},
            )

    def _fork(self, theirs: socket.socket) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Python warns of other threads, of which the command's own waits for a signal
            warnings.simplefilter("ignore", DeprecationWarning)
            forked = os.fork()
        if forked == 0:
            self._tasks.close()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            from ligerprof.runs.simulated.server import serve

            serve(theirs)

    def start(
        self, task: str, recipe: TrainingRecipe | None, prepares: str | None = None, **options: Any
    ) -> Connection:
        """Start a task, as `run` does, and return its connection.

        Args:
            prepares: the function as `module:name` that imports what the task needs; it receives the recipe as its
                JSON, and the options. None: the server gives itself a simulated GPU and imports the model.

        Raises:
            OSError: the server has ended.
        """
        ours, theirs = socket.socketpair()
        connection = Connection(ours.detach())
        with theirs:
            socket.send_fds(self._tasks, [b"?"], [theirs.fileno()])
        values = None if recipe is None else recipe.to_json()
        connection.send((task, values, options, str(Path.cwd()), prepares))
        return connection

    def run(self, task: str, recipe: TrainingRecipe | None, progress: Callable[[str], None], **options: Any) -> Any:
        """The result of a task in a process of its own, whose `cuda` is the simulated GPU.

        Args:
            task: the function as `module:name`; it is called with the recipe, unless that is None, the progress and
                the options.

        Raises:
            LigerprofError: as the task does; or its process ended.
        """
        try:
            with self.start(task, recipe, **options) as connection:
                while True:
                    kind, value = connection.recv()
                    if kind == "progress":
                        progress(value)
                    elif kind == "outcome":
                        return value
                    else:
                        raise value
        except (EOFError, OSError) as error:
            self.close()
            raise LigerprofError(
                "simulate: the process that simulates has ended. It may have run out of main memory."
            ) from error

    def is_ours(self) -> bool:
        """Whether this process started it, and it has not ended."""
        has_ended = self._tasks.fileno() < 0 or (self._process is not None and self._process.poll() is not None)
        return self._owner == os.getpid() and not has_ended

    def close(self) -> None:
        """End the server; tasks end with it."""
        self._tasks.close()
        if self._process is not None:
            # it is importing if it does not end by itself
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
            self._process.kill()
            self._process.wait()

    def exit_code(self) -> int:
        """The exit code of a process that has just ended; of one that goes on, that of a task which was killed."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(_END_SECONDS)
        return -signal.SIGKILL


_workers: list[Worker] = []


def worker() -> Worker:
    """The worker of this process, which starts with the first simulation."""
    if not _workers or not _workers[0].is_ours():
        _workers[:] = [Worker()]
        atexit.register(_workers[0].close)
    return _workers[0]


def simulate_step(
    recipe: TrainingRecipe, *, record: bool = True, repeat: bool = True, progress: Progress | None = None
) -> StepOutcome:
    """Run one profiled step of a recipe without a GPU.

    Args:
        record: whether to record events for the outcome's snapshot.
        repeat: whether to record also those micro-batches that repeat the events of earlier ones.

    Raises:
        UnsupportedError: the simulator does not cover an option.
        KernelUnavailableError: kernels that cannot be simulated.
        MissingDependencyError: a package or a C++ compiler is missing.
        ModelCodeError: the model's own code fails on the recipe.
        RecipeError: a memory limit above the GPU's memory, or allocator settings that torch would refuse.
    """
    require_supported(recipe, command="simulate", simulated=True)
    require_packages(recipe, command="simulate", simulated=True)
    find_limit(recipe)
    for package in ("torch", "transformers"):
        # before the other process, whose errors lose the name
        if find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    # the collector would walk over all objects of a snapshot that arrives
    with collector_paused():
        outcome: StepOutcome = worker().run(SIMULATE, recipe, progress or silent, record=record, repeat=repeat)
    return outcome
