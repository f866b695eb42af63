"""A process that simulates: it imports what recipes need, and forks a process for each simulation.

A process whose `cuda` is the simulated GPU has no way back, and so is never that of a user's program. It is a new
one, or a fork of the command line's own: autograd's threads, which start with the first backward pass, are not
in a fork.
"""

import atexit
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ligerprof import own_process
from ligerprof.errors import LigerprofError
from ligerprof.recipe.training import TrainingRecipe

SERVER = "ligerprof.runs.simulated.server"
# the task that returns the StepOutcome of a recipe
SIMULATE = "ligerprof.runs.simulated.rank:simulate_here"
# numpy's BLAS starts a thread per core when it is imported, and a process with threads must not fork
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}


class Worker:
    """The other end of a process that simulates."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        if own_process.is_own():
            self._fork(ours, theirs)
        else:
            subprocess.Popen(
                [sys.executable, "-m", SERVER, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **ONE_THREAD},
            )
        theirs.close()
        self._process = os.getpid()
        self._connection = Connection(ours.detach())

    def _fork(self, ours: socket.socket, theirs: socket.socket) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Python warns of other threads, of which the command's own waits for a signal
            warnings.simplefilter("ignore", DeprecationWarning)
            forked = os.fork()
        if forked == 0:
            ours.close()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            from ligerprof.runs.simulated.server import serve

            serve([Connection(theirs.detach())])

    def run(self, task: str, recipe: TrainingRecipe | None, progress: Callable[[str], None], **options: Any) -> Any:
        """The result of a task in a process of its own, whose `cuda` is the simulated GPU.

        Args:
            task: the function as `module:name`; it is called with the recipe, unless that is None, the progress and
                the options.

        Raises:
            LigerprofError: as the task does; or its process ended.
        """
        try:
            self._connection.send((task, None if recipe is None else recipe.to_json(), options, str(Path.cwd())))
            while True:
                kind, value = self._connection.recv()
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
        except BaseException:
            # an answer may still come
            if sys.exc_info()[0] is KeyboardInterrupt:
                self.close()
            raise

    def is_ours(self) -> bool:
        """Whether this process started it, and it is still there."""
        return self._process == os.getpid() and not self._connection.closed

    def close(self) -> None:
        """End the process."""
        with suppress(OSError):
            self._connection.close()


_workers: list[Worker] = []


def worker() -> Worker:
    """The worker of this process, which starts with the first simulation."""
    if not _workers or not _workers[0].is_ours():
        _workers[:] = [Worker()]
        atexit.register(_workers[0].close)
    return _workers[0]
