"""Run directories: where they are made, what their files are called, and how they are read."""

import json
import pickle
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ligerprof.errors import RunDirectoryError
from ligerprof.files import FileKind, read_json, write_new_file
from ligerprof.snapshots import SNAPSHOT_NAME

RECIPE, RESULT, TENSORBOARD, REPORT = "recipe.json", "result.json", "tensorboard", "report.html"
DEFAULT_PARENT = Path("runs")
# as torch.profiler.tensorboard_trace_handler names them, compressed or not
TRACES = "*.pt.trace.json*"
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
        """The log directory for TensorBoard."""
        return self.path / TENSORBOARD

    def remove_if_empty(self) -> None:
        """Remove the folder if the run left nothing in it."""
        with suppress(OSError):
            self.path.rmdir()

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Write one of the JSON files, as `write_text` does."""
        self.write_text(name, json.dumps(values, indent=2) + "\n")

    def write_snapshot(self, snapshot: Mapping[str, Any], *, rank: int | None = None, force: bool = True) -> None:
        """Write a snapshot dict as torch.cuda.memory._dump_snapshot does.

        Args:
            rank: the rank it is from, unless it is the snapshot of the whole run.
            force: overwrite a snapshot that exists.

        Raises:
            OutputError: the snapshot exists, or cannot be written.
        """
        name = SNAPSHOT_NAME if rank is None else f"snapshot-rank{rank}.pickle"
        content = pickle.dumps(snapshot, protocol=4)
        write_new_file(self.path / name, content, force=force, flag="force=True")

    def write_text(self, name: str, text: str) -> None:
        """Write a file of the run, whole or not at all; a file of an earlier run is replaced.

        Raises:
            OutputError: it cannot be written.
        """
        write_new_file(self.path / name, text, force=True)


def create_run_directory(output: Path | None, *, force: bool = False) -> RunDirectory:
    """Create the folder of a new run: `output`, or the next number under runs/.

    Args:
        output: the folder itself; None: runs/001, runs/002, …
        force: write into `output` even if it has files.

    Raises:
        RunDirectoryError: it exists with files in it, or cannot be created.
    """
    try:
        return RunDirectory(path=_numbered(DEFAULT_PARENT) if output is None else _named(output, force))
    except OSError as error:
        where = output or DEFAULT_PARENT
        raise RunDirectoryError(
            f"{where}: cannot create the run directory ({error.strerror}). Choose another -o."
        ) from None


def _numbered(parent: Path) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    taken = [int(entry.name) for entry in parent.iterdir() if entry.name.isdecimal()]
    number = max(taken, default=0) + 1
    while True:
        path = parent / f"{number:03d}"
        try:
            # mkdir decides between two runs that start at once
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return path


def _named(output: Path, force: bool) -> Path:
    output.mkdir(parents=True, exist_ok=True)
    if not force and next(output.iterdir(), None) is not None:
        raise RunDirectoryError(f"{output}: not empty. Choose another -o, or add --force to overwrite its run.")
    return output


def find_trace(path: Path) -> Path:
    """The newest profiler trace in a run directory, its tensorboard/, or any folder that holds traces itself.

    Raises:
        RunDirectoryError: none of them holds one.
    """
    found = [file for folder in (path / TENSORBOARD, path) for file in folder.glob(TRACES) if file.is_file()]
    if not found:
        raise RunDirectoryError(f"{path}: it holds no profiler trace ({TRACES}). `ligerprof step` writes one on a GPU.")
    return max(found, key=lambda file: (file.stat().st_mtime, file.name))


def read_result(path: Path) -> dict[str, Any]:
    """Read result.json of a run directory.

    Raises:
        RunDirectoryError: it is missing or not a JSON object.
    """
    return read_json(path / RESULT, _RESULT_FILE)
