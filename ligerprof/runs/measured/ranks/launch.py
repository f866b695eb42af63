"""Start one process per rank on this machine, collect the outcomes, and end all ranks when one fails."""

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ligerprof.errors import LigerprofError
from ligerprof.runs.outcome import Progress, StepOutcome

# the function that each rank runs; pickled and sent to the rank's process
Work = Callable[[Progress], StepOutcome]

# how long other ranks can still report after one has failed: they usually run out of memory at the same place
_GRACE_SECONDS = 10.0
_END_SECONDS = 5.0


def local_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The variables that torch.distributed and DeepSpeed read, for a rank of a group on this machine."""
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size))
    return {**ranks, **sizes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def run_ranks(work: Work, world_size: int, logs: Path, progress: Progress) -> dict[int, StepOutcome]:
    """Run `work` once per rank, each in its own process.

    Args:
        logs: the folder for the output of each rank K, tracebacks included: rank-K.log.
        progress: callback that receives the status messages of rank 0.

    Returns:
        The outcomes by rank; if one ran out of memory, only those of the ranks that still reported.

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
            # only the rank keeps this end open: when it dies, our end reads EOF
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
                    self._receive(connection)
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

    def _receive(self, connection: Connection) -> None:
        rank = self._open[connection]
        message: StepOutcome | LigerprofError | str
        try:
            message = connection.recv()
        except EOFError:
            message = self._death(rank)
        if isinstance(message, str):
            if rank == 0:
                self._progress(message)
            return
        del self._open[connection]
        if isinstance(message, StepOutcome):
            self._found[rank] = message
        else:
            self._failures.append(message)

    def _death(self, rank: int) -> LigerprofError:
        process = self._processes[rank]
        process.join(_END_SECONDS)
        how = f"ended with exit code {process.exitcode}"
        if process.exitcode is not None and process.exitcode < 0:
            name = signal.Signals(-process.exitcode).name
            how = f"was ended by {name}" + (" (did main memory run out?)" if name == "SIGKILL" else "")
        return LigerprofError(f"rank {rank} {how}. Its output is in {_log(self._logs, rank)}.")

    def end(self) -> None:
        """End every rank: a rank that waits for a dead one would wait for minutes."""
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


def _be_rank(work: Work, settings: Mapping[str, str], connection: Connection, log: Path) -> None:
    """The main function of a rank's process."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ.update(settings)
    _redirect_output(log)
    try:
        message: StepOutcome | LigerprofError = work(connection.send)
    except LigerprofError as error:
        message = error
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        message = LigerprofError(f"rank {settings['RANK']} failed ({reason}). Its output is in {log}.")
    # the parent may have closed its end already
    with contextlib.suppress(BrokenPipeError):
        connection.send(message)
    # torch's own exit handlers would wait for ranks that may have ended
    os._exit(0)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _redirect_output(log: Path) -> None:
    """Redirect stdout and stderr into a file, including those of C++ libraries and compilers."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
