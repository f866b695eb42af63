"""The folder of a sweep: grids, result rows that survive a kill, and a lock against a second sweep."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ligerprof.errors import ResultFormatError, RunDirectoryError
from ligerprof.files import FileKind, read_json, write_new_file
from ligerprof.runs.sweep.cells import RESULTS_NAME, Cell, read_cells, read_rows
from ligerprof.serialization import document

GRIDS, LOCK = "sweep.json", "sweep.lock"
_GRIDS_FILE = FileKind(error=ResultFormatError, hint="Choose another -o.")


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepFolder:
    """`results.jsonl` (one row per cell), `sweep.json` (the grids), and `runs/KEY/` (each cell's run directory).

    Methods that write raise a RunDirectoryError if the disk refuses.
    """

    path: Path

    @property
    def results(self) -> Path:
        """One JSON object per line."""
        return self.path / RESULTS_NAME

    @property
    def runs(self) -> Path:
        """The folder of each cell's files."""
        return self.path / "runs"

    def make(self) -> None:
        """Make the folder unless it exists.

        Raises:
            RunDirectoryError: it contains something else.
        """
        with disk_errors_in_a_line(self.path):
            found = {entry.name for entry in self.path.iterdir()} if self.path.exists() else set()
            # rows alone suffice: a sweep can continue from those of another machine
            is_ours = bool(found & {GRIDS, RESULTS_NAME, LOCK})
            # a sweep that was stopped right after this method
            is_ours = is_ours or (found == {self.runs.name} and next(self.runs.iterdir(), None) is None)
            if found and not is_ours:
                raise RunDirectoryError(f"{self.path}: not empty, and not a sweep's folder. Choose another -o.")
            self.runs.mkdir(parents=True, exist_ok=True)

    def read(self) -> dict[str, Cell]:
        """The cells so far by key; of two rows with one key the later counts.

        Raises:
            ResultFormatError: a line was not written by a sweep.
        """
        return {cell.key: cell for cell in read_cells([self.results])} if self.results.exists() else {}

    def rows(self) -> dict[str, dict[str, Any]]:
        """The rows of the file by key, unchecked."""
        rows = read_rows(self.results) if self.results.exists() else ()
        # results of `ligerprof step` have no key
        return {row["key"]: row for _, row in rows if "key" in row}

    def append(self, row: Mapping[str, Any]) -> None:
        """Append a row; it is on the disk when this returns."""
        line = json.dumps(row).encode() + b"\n"
        with disk_errors_in_a_line(self.results), self.results.open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def repair(self) -> None:
        """Remove an incomplete last line, which a killed sweep wrote, or add the missing line end to a whole one."""
        if not self.results.exists():
            return
        with disk_errors_in_a_line(self.results):
            whole, end, rest = self.results.read_bytes().rpartition(b"\n")
            if rest and _is_json(rest):
                with self.results.open("ab") as file:
                    file.write(b"\n")
            elif rest:
                os.truncate(self.results, len(whole) + len(end))

    def record_grids(self, grids: list[dict[str, Any]]) -> None:
        """Add grids to sweep.json, without duplicates.

        Raises:
            ResultFormatError: sweep.json contains something else.
            OutputError: it cannot be written.
        """
        path = self.path / GRIDS
        known = read_json(path, _GRIDS_FILE).get("grids") if path.exists() else []
        if not isinstance(known, list):
            raise ResultFormatError(f"{path}: not written by a sweep. Choose another -o.")
        content = document("grids", {"grids": known + [grid for grid in grids if grid not in known]})
        write_new_file(path, json.dumps(content, indent=2) + "\n", force=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other sweeps out of the folder; the lock ends with the process.

        Raises:
            RunDirectoryError: another sweep is running in it.
        """
        import fcntl

        with disk_errors_in_a_line(self.path):
            lock = (self.path / LOCK).open("w")
        with lock as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunDirectoryError(f"{self.path}: another sweep is running here. Wait until it ends.") from None
            yield


@contextmanager
def disk_errors_in_a_line(path: Path) -> Iterator[None]:
    """Turn an OSError into a RunDirectoryError, which is one line."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise RunDirectoryError(f"{where}: {error.strerror}. Make room, or choose another -o.") from None


def _is_json(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
