"""Folders for recordings of processes that nobody gave a folder of their own."""

from contextlib import suppress
from pathlib import Path

from ligerprof.errors import LigerprofError, OutputError
from ligerprof.runs.directory import RunDirectory, create_run_directory

_MOST = 1000


def create_rank_directory(common: Path, rank: int | None) -> RunDirectory:
    """Create `rank3` in a common folder, or `rank3-2` and so on if that has files; without a rank, `process`.

    Raises:
        OutputError: no folder can be created.
    """
    name = "process" if rank is None else f"rank{rank}"
    for number in range(1, _MOST):
        with suppress(LigerprofError):
            return create_run_directory(common / (name if number == 1 else f"{name}-{number}"))
    raise OutputError(f"{common}: no folder for the recording of {name} can be created there. Is it writable?")
