"""Run directories: their location, the names of their files, and how to read and write them."""

import json
import pickle
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ligerprof.errors import LigerprofError, OutputError, RunDirectoryError
from ligerprof.files import FileKind, read_json, write_new_file
from ligerprof.recipe import RECIPE_NAME
from ligerprof.snapshots import SNAPSHOT_NAME

RECIPE, RESULT, TENSORBOARD, REPORT = RECIPE_NAME, "result.json", "tensorboard", "report.html"
DEFAULT_PARENT = Path("runs")
# as torch.profiler.tensorboard_trace_handler names them, compressed or not
TRACES = "*.pt.trace.json*"
_MOST_RANKS, _MOST_FOLDERS = 1_000_000, 1000
_RESULT_FILE = FileKind(error=RunDirectoryError, hint="Give a directory that `ligerprof step` wrote.")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDirectory:
    """A folder with recipe.json, result.json, snapshot.pickle, tensorboard/ and report.html.

    Several ranks have a snapshot each: snapshot.pickle for the rank with the highest peak, snapshot-rankK.pickle
    for the others. The output of rank K is in rank-K.log.
    """

    path: Path

    @property
    def snapshot(self) -> Path:
        """The snapshot in torch's format, for `ligerprof explain` and torch's viewers."""
        return self.path / SNAPSHOT_NAME

    @property
    def tensorboard(self) -> Path:
        return self.path / TENSORBOARD

    def rank_snapshot(self, rank: int) -> Path:
        """The snapshot of a rank other than the worst."""
        return self.path / f"snapshot-rank{rank}.pickle"

    def remove_if_empty(self) -> None:
        """Remove the folder if the run left nothing in it, and runs/ if it has no other run."""
        with suppress(OSError):
            self.path.rmdir()
            if self.path.parent == DEFAULT_PARENT:
                DEFAULT_PARENT.rmdir()

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Write a JSON file as `write_text` does."""
        self.write_text(name, json.dumps(values, indent=2) + "\n")

    def write_snapshot(self, snapshot: Mapping[str, Any], *, rank: int | None = None, force: bool = True) -> None:
        """Write a snapshot dict as torch.cuda.memory._dump_snapshot does; `rank` None: the snapshot of the whole run.

        Raises:
            OutputError: the snapshot exists (without `force`), or cannot be written.
        """
        path = self.snapshot if rank is None else self.rank_snapshot(rank)
        write_new_file(path, pickle.dumps(snapshot, protocol=4), force=force, flag="force=True")

    def write_text(self, name: str, text: str) -> None:
        """Write a file of the run atomically, replacing one of an earlier run.

        Raises:
            OutputError: the file cannot be written.
        """
        write_new_file(self.path / name, text, force=True)


def create_run_directory(output: Path | None, *, force: bool = False) -> RunDirectory:
    """Create the folder of a new run: `output`, or the next of runs/001, runs/002 and so on.

    Raises:
        RunDirectoryError: `output` contains files (without `force`), or cannot be created.
    """
    try:
        if output is None:
            return RunDirectory(path=_numbered(DEFAULT_PARENT))
        output.mkdir(parents=True, exist_ok=True)
        used = next(output.iterdir(), None) is not None
    except OSError as error:
        where = output or DEFAULT_PARENT
        raise RunDirectoryError(
            f"{where}: cannot create the run directory ({error.strerror}). Choose another -o."
        ) from None
    if used and not force:
        raise RunDirectoryError(f"{output}: not empty. Choose another -o, or add --force to overwrite its run.")
    return RunDirectory(path=output)


def _numbered(parent: Path) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    taken = [int(entry.name) for entry in parent.iterdir() if entry.name.isdecimal()]
    number = max(taken, default=0) + 1
    while True:
        path = parent / f"{number:03d}"
        try:
            # another run that starts at the same moment may create it first
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return path


def find_trace(path: Path) -> Path:
    """The newest profiler trace in a folder or its folder tensorboard; raises RunDirectoryError if none is there."""
    found = [file for folder in (path / TENSORBOARD, path) for file in folder.glob(TRACES) if file.is_file()]
    if not found:
        raise RunDirectoryError(f"{path}: it holds no profiler trace ({TRACES}). `ligerprof step` writes one on a GPU.")
    return max(found, key=lambda file: (file.stat().st_mtime, file.name))


def recorded_ranks(path: Path) -> dict[int, Path]:
    """The snapshots of a run of several ranks, by rank.

    Raises:
        RunDirectoryError: result.json is missing or damaged, or does not list several ranks with snapshots.
    """
    run, listed = RunDirectory(path=path), read_result(path).get("ranks")
    entries = listed if isinstance(listed, list) else []
    ranks: list[Any] = [entry.get("rank") if isinstance(entry, dict) else None for entry in entries]
    if any(type(rank) is not int or not 0 <= rank <= _MOST_RANKS for rank in ranks):
        raise RunDirectoryError(f"{path / RESULT}: a rank is not a number. Run the step again.")
    found = {rank: run.rank_snapshot(rank) for rank in ranks if run.rank_snapshot(rank).is_file()}
    # the worst rank's snapshot is that of the run
    if len(ranks) - len(found) == 1 and run.snapshot.is_file():
        found |= {rank: run.snapshot for rank in ranks if rank not in found}
    if len(found) < 2:
        raise RunDirectoryError(f"{path}: not a run of several ranks. Leave out --ranks.")
    return dict(sorted(found.items()))


def read_result(path: Path) -> dict[str, Any]:
    """Read result.json of a run directory; raises RunDirectoryError if the file is missing or not a JSON object."""
    return read_json(path / RESULT, _RESULT_FILE)


def create_rank_directory(common: Path, rank: int | None) -> RunDirectory:
    """Create `rank3` in a common folder, or `rank3-2` and so on if that has files; without a rank, `process`.

    Raises:
        OutputError: no folder can be created.
    """
    name = "process" if rank is None else f"rank{rank}"
    for number in range(1, _MOST_FOLDERS):
        with suppress(LigerprofError):
            return create_run_directory(common / (name if number == 1 else f"{name}-{number}"))
    raise OutputError(f"{common}: no folder for the recording of {name} can be created there. Is it writable?")
