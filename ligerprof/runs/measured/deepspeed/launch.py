"""Start one process per rank on this machine, collect the outcomes, and end all ranks when one fails."""

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ligerprof.errors import LigerprofError
from ligerprof.runs.outcome import Progress, StepOutcome

# what a rank does, given a callback for its progress; pickled to be sent to the rank's process
Work = Callable[[Progress], StepOutcome]

# how long other ranks may still report after one has failed: they usually run out of memory at the same place
_GRACE_SECONDS = 10.0
_END_SECONDS = 5.0


def local_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The variables that torch.distributed and DeepSpeed read, for a rank of a group on this machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def run_ranks(work: Work, world_size: int, logs: Path, progress: Progress) -> dict[int, StepOutcome]:
    """Run `work` once per rank, each in its own process.

    Args:
        logs: a folder; the output of rank K, tracebacks included, goes to rank-K.log in it.
        progress: callback that receives the status messages of rank 0.

    Returns:
        Each rank's outcome; if one ran out of memory, only those of the ranks that still reported.

    Raises:
        LigerprofError: a rank refused the recipe or died; the others were ended.
    """
    group = _Group(work, world_size, logs, progress)
    try:
        return group.outcomes()
    finally:
        group.end()


class _Group:
    """The ranks of one run and their messages."""

    def __init__(self, work: Work, world_size: int, logs: Path, progress: Progress) -> None:
        self._logs, self._progress = logs, progress
        self._found: dict[int, StepOutcome] = {}
        self._failures: list[LigerprofError] = []
        self._processes: dict[int, Any] = {}
        self._open: dict[Connection, int] = {}
        # a forked process cannot use CUDA where its parent did
        context = multiprocessing.get_context("spawn")
        port = free_port()
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            settings = local_environment(rank, world_size, port)
            process = context.Process(target=_be_rank, args=(work, settings, theirs, _log(logs, rank)), daemon=True)
            process.start()
            # only the rank holds this end now: when it dies, our end reads EOF
            theirs.close()
            self._processes[rank], self._open[ours] = process, rank

    def outcomes(self) -> dict[int, StepOutcome]:
        """Wait for all ranks, or until the grace period after a failure is over."""
        deadline: float | None = None
        while self._open:
            if deadline is None and self._failed:
                deadline = time.monotonic() + _GRACE_SECONDS
            ready = wait(list(self._open), None if deadline is None else deadline - time.monotonic())
            for connection in ready:
                if isinstance(connection, Connection):
                    self._hear(connection)
            if deadline is not None and time.monotonic() >= deadline:
                break
        if self._failures and not self._out_of_memory:
            raise self._failures[0]
        return dict(sorted(self._found.items()))

    @property
    def _out_of_memory(self) -> bool:
        return any(outcome.oom is not None for outcome in self._found.values())

    @property
    def _failed(self) -> bool:
        return bool(self._failures) or self._out_of_memory

    def _hear(self, connection: Connection) -> None:
        rank = self._open[connection]
        try:
            message = connection.recv()
        except EOFError:
            del self._open[connection]
            if rank not in self._found:
                self._failures.append(self._death(rank))
            return
        if isinstance(message, StepOutcome):
            self._found[rank] = message
            del self._open[connection]
        elif isinstance(message, LigerprofError):
            self._failures.append(message)
            del self._open[connection]
        elif rank == 0:
            self._progress(message)

    def _death(self, rank: int) -> LigerprofError:
        process = self._processes[rank]
        process.join(_END_SECONDS)
        return LigerprofError(f"rank {rank} {_how(process.exitcode)}. Its output is in {_log(self._logs, rank)}.")

    def end(self) -> None:
        """End every rank: one that waits for a dead one would wait for minutes."""
        for connection in self._open:
            connection.close()
        for process in self._processes.values():
            process.join(0 if self._failed else _END_SECONDS)
            process.terminate()
        for process in self._processes.values():
            process.join(_END_SECONDS)
            process.kill()
            process.join()


def _log(logs: Path, rank: int) -> Path:
    return logs / f"rank-{rank}.log"


def _how(exit_code: int | None) -> str:
    """An exit code in words."""
    if exit_code is not None and exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = " (did main memory run out?)" if name == "SIGKILL" else ""
        return f"was ended by {name}{hint}"
    return f"ended with exit code {exit_code}"


def _be_rank(work: Work, settings: Mapping[str, str], connection: Connection, log: Path) -> None:
    """The main function of a rank's process."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ.update(settings)
    _print_to(log)
    try:
        message: StepOutcome | LigerprofError = work(connection.send)
    except LigerprofError as error:
        message = error
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        message = LigerprofError(f"rank {settings['RANK']} failed ({reason}). Its output is in {log}.")
    # the parent may have given up already
    with contextlib.suppress(BrokenPipeError):
        connection.send(message)
    # torch's own exit would wait for ranks that may have ended
    os._exit(0)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _print_to(log: Path) -> None:
    """Redirect stdout and stderr into a file, including those of C++ libraries and compilers."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


@contextlib.contextmanager
def set_environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside a context."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
