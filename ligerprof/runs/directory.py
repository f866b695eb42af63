"""The directory a run leaves: where it is made, what its files are called, how they are read back."""

import json
import pickle
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ligerprof.errors import RunDirectoryError

RECIPE, RESULT, SNAPSHOT, TENSORBOARD, REPORT = (
    "recipe.json",
    "result.json",
    "snapshot.pickle",
    "tensorboard",
    "report.html",
)
DEFAULT_PARENT = Path("runs")
# as torch.profiler.tensorboard_trace_handler names them, packed or not
TRACES = "*.pt.trace.json*"
_MAX_JSON_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDirectory:
    """A folder with recipe.json, result.json, snapshot.pickle, tensorboard/ and report.html.

    Several ranks leave a snapshot each: the worst rank's is snapshot.pickle, the others' are
    snapshot-rankK.pickle, and what the ranks printed is in rank-K.log.
    """

    path: Path

    @property
    def snapshot(self) -> Path:
        """Torch's own format, for `ligerprof explain` and torch's viewers."""
        return self.path / SNAPSHOT

    @property
    def tensorboard(self) -> Path:
        """The log directory for TensorBoard."""
        return self.path / TENSORBOARD

    def remove_if_empty(self) -> None:
        """Take the folder away where a run left nothing in it."""
        with suppress(OSError):
            self.path.rmdir()

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Write one of the JSON files, whole or not at all."""
        self.write_bytes(name, (json.dumps(values, indent=2) + "\n").encode())

    def write_snapshot(self, snapshot: Mapping[str, Any], *, rank: int | None = None) -> None:
        """Write a snapshot dict as torch.cuda.memory._dump_snapshot does.

        Args:
            rank: whose it is, where it is not the run's one snapshot but another rank's beside it.
        """
        name = SNAPSHOT if rank is None else f"snapshot-rank{rank}.pickle"
        self.write_bytes(name, pickle.dumps(snapshot, protocol=4))

    def write_bytes(self, name: str, content: bytes) -> None:
        """Write a file, whole or not at all.

        Raises:
            RunDirectoryError: the disk refuses.
        """
        partial = self.path / f".{name}.partial"
        try:
            partial.write_bytes(content)
            partial.replace(self.path / name)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise RunDirectoryError(
                f"{self.path / name}: cannot write ({error.strerror}). Choose another -o."
            ) from None


def create_run_directory(output: Path | None, *, force: bool = False) -> RunDirectory:
    """Make the folder of a new run: `output`, or the next number under runs/.

    Args:
        output: the folder itself; None takes runs/001, runs/002, …
        force: write into `output` though it has files.

    Raises:
        RunDirectoryError: it exists with files in it, or cannot be made.
    """
    try:
        return RunDirectory(path=_numbered(DEFAULT_PARENT) if output is None else _named(output, force))
    except OSError as error:
        where = output or DEFAULT_PARENT
        raise RunDirectoryError(
            f"{where}: cannot make the run directory ({error.strerror}). Choose another -o."
        ) from None


def _numbered(parent: Path) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    taken = [int(entry.name) for entry in parent.iterdir() if entry.name.isdecimal()]
    number = max(taken, default=0) + 1
    while True:
        path = parent / f"{number:03d}"
        try:
            # mkdir is what decides between two runs that start at once
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
        RunDirectoryError: there is none.
    """
    found = [file for folder in (path / TENSORBOARD, path) for file in folder.glob(TRACES) if file.is_file()]
    if not found:
        raise RunDirectoryError(
            f"{path}: no profiler trace ({TRACES}) in it. `ligerprof step` leaves one where it runs on a GPU."
        )
    return max(found, key=lambda file: (file.stat().st_mtime, file.name))


def read_result(path: Path) -> dict[str, Any]:
    """Read result.json of a run directory.

    Raises:
        RunDirectoryError: there is none, or it is no JSON object.
    """
    file = path / RESULT
    try:
        if file.stat().st_size > _MAX_JSON_BYTES:
            raise RunDirectoryError(f"{file}: too large for a result of `ligerprof step`.")
        result = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunDirectoryError(f"{path}: no {RESULT}. Give a directory that `ligerprof step` wrote.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunDirectoryError(f"{file}: not readable as JSON ({error}). Run the step again.") from None
    if not isinstance(result, dict):
        raise RunDirectoryError(f"{file}: not a JSON object. Run the step again.")
    return result
