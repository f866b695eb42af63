"""LIGERPROF=oom: keep the allocator's history with Python stacks, and explain it when memory runs out."""

import atexit
import os
import subprocess
import sys

from ligerprof.errors import LigerprofError, OutputError
from ligerprof.files import write_new_file
from ligerprof.runs.directory import DEFAULT_PARENT, RunDirectory, create_rank_directory, create_run_directory
from ligerprof.runs.recording.record import CudaHistory
from ligerprof.runs.recording.settings import VARIABLE, Settings, say
from ligerprof.runs.recording.summary import current_rank

# thirty steps of a Llama 1B; more would take longer to write and to explain
_MAX_ENTRIES = 300_000
# a program may fail in a loop that it continues
_MOST_SNAPSHOTS = 5
_EXPLANATION_SECONDS = 600
_EXPLAINED = "explained-by-rank"


class OutOfMemoryWatch:
    """Writes a snapshot when an allocation fails, also if the program catches the exception, and explains it.

    The first failure is explained at once. Later ones replace the snapshot, and the last one is explained when the
    process ends. Of several ranks of a launcher, the first that fails prints; each one writes.
    """

    def __init__(self, settings: Settings, history: CudaHistory | None = None) -> None:
        self._pid = os.getpid()
        self._settings = settings
        self._history = history or CudaHistory()
        self._run: RunDirectory | None = None
        self._written = self._explained = 0

    def start(self) -> None:
        self._history.start(max_entries=_MAX_ENTRIES, stacks="python")
        self._history.observe_out_of_memory(self._save)
        atexit.register(self._explain_last)

    def _save(self) -> None:
        if self._pid != os.getpid() or self._written >= _MOST_SNAPSHOTS:
            return
        try:
            run = self._run = self._run or self._new_run()
            run.write_snapshot(self._history.snapshot())
        except LigerprofError as error:
            say(f"memory ran out, and the snapshot cannot be written: {error}")
            return
        self._written += 1
        if self._explained:
            say(f"memory ran out again; replaced {run.snapshot}")
        elif _prints(run, current_rank()):
            self._explain(run)
        else:
            say(f"memory ran out on rank {current_rank()} too; wrote {run.snapshot}")
            self._explained = self._written

    def _new_run(self) -> RunDirectory:
        """The folder of this process: one below a common folder for a launcher's rank."""
        rank = current_rank()
        if rank is None and self._settings.output is None:
            return create_run_directory(None)
        # ranks of one launcher on one host have the same parent process
        common = self._settings.output or DEFAULT_PARENT / f"oom-{os.getppid()}"
        return create_rank_directory(common, rank)

    def _explain(self, run: RunDirectory) -> None:
        """Run `ligerprof explain` in a process of its own: this one is out of memory only on the device."""
        say(f"memory ran out; wrote {run.snapshot}")
        self._explained = self._written
        command = [sys.executable, "-m", "ligerprof", "explain", str(run.path)]
        environment = {**os.environ, VARIABLE: ""}
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, env=environment, check=False, timeout=_EXPLANATION_SECONDS, text=True
            )
        except (OSError, subprocess.SubprocessError) as error:
            say(f"it cannot be explained here ({type(error).__name__}); `ligerprof explain {run.path}` does that")
            return
        if sys.stderr is not None:
            sys.stderr.write(done.stdout)

    def _explain_last(self) -> None:
        if self._pid == os.getpid() and self._run is not None and self._explained < self._written:
            self._explain(self._run)


def _prints(run: RunDirectory, rank: int | None) -> bool:
    """Whether this rank is the first of its launcher to run out of memory."""
    if rank is None:
        return True
    try:
        write_new_file(run.path.parent / _EXPLAINED, f"{rank}\n")
    except OutputError:
        return False
    return True
