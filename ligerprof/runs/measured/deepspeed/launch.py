"""Start one process a rank on this machine, hear from each, and end them all when one fails."""

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

# what a rank does: told how to report progress, it measures; sent to its process by pickling
Work = Callable[[Progress], StepOutcome]

# how long ranks may still report after one has failed: the others usually run out of memory at the same place
_GRACE_SECONDS = 10.0
_END_SECONDS = 5.0


def local_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torch.distributed and DeepSpeed read of a rank whose group lives on this machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def run_ranks(work: Work, world_size: int, logs: Path, progress: Progress) -> dict[int, StepOutcome]:
    """Run `work` once a rank, each in a process of its own.

    Args:
        logs: a folder; what rank K prints goes to rank-K.log in it, tracebacks too.
        progress: is told what rank 0 does.

    Returns:
        Each rank's outcome. Where one ran out of memory, only the outcomes of those that still reported.

    Raises:
        LigerprofError: a rank refused or died; says which and why. The others were ended.
    """
    group = _Group(work, world_size, logs, progress)
    try:
        return group.outcomes()
    finally:
        group.end()


class _Group:
    """The ranks of one run and what was heard from them."""

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
            # the rank alone holds this end now: when it dies, ours reads the end of the file
            theirs.close()
            self._processes[rank], self._open[ours] = process, rank

    def outcomes(self) -> dict[int, StepOutcome]:
        """Hear all ranks out, or until the grace after a failure is over."""
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
        """Leave no rank behind: a rank that waits for a dead one would wait for minutes."""
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
    """What an exit code tells, in words."""
    if exit_code is not None and exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = ", perhaps for main memory" if name == "SIGKILL" else ""
        return f"was ended by {name}{hint}"
    return f"ended with exit code {exit_code}"


def _be_rank(work: Work, settings: Mapping[str, str], connection: Connection, log: Path) -> None:
    """The life of a rank's process."""
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
    # whoever listened may have given up already
    with contextlib.suppress(BrokenPipeError):
        connection.send(message)
    # torch would wait for ranks that may be gone
    os._exit(0)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _print_to(log: Path) -> None:
    """Lead standard output and error into a file, those of C++ libraries and compilers too."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


@contextlib.contextmanager
def set_environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set variables for a while, and have them as they were again."""
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
