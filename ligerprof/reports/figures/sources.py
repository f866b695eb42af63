"""Read the sources of figures: files and folders with cells, recordings or bench records."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ligerprof.errors import ResultFormatError
from ligerprof.files import FileKind, starts_as_json
from ligerprof.reports.figures.series import kernel_set
from ligerprof.runs.bench.records import Finding, join_findings, read_lines
from ligerprof.runs.directory import RESULT, read_result
from ligerprof.runs.sweep.cells import RESULTS_NAME, Cell, cell_from_json, read_cells
from ligerprof.snapshots import SNAPSHOT_NAME

if TYPE_CHECKING:
    from ligerprof.analyzers.explain.analysis import SnapshotAnalysis

_LONGEST_LINE = 2**16
_RESULTS = FileKind(error=ResultFormatError, hint="Give a file of sweep, step or bench.")


@dataclass(frozen=True, kw_only=True)
class SnapshotSource:
    """A recording, which is read when a figure needs it.

    Attributes:
        titles: names to choose from, shorter ones first.
        origin: `measured` or `simulated`, empty if unknown.
    """

    path: Path
    titles: tuple[str, ...]
    origin: str = ""

    @cached_property
    def analysis(self) -> "SnapshotAnalysis":
        """The recording, analyzed once for all figures; raises SnapshotFormatError if it is not a snapshot."""
        from ligerprof.analyzers.explain.analysis import analyze

        return analyze(self.path)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """The contents of all sources."""

    cells: tuple[Cell, ...] = ()
    snapshots: tuple[SnapshotSource, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def titles(self) -> tuple[str, ...]:
        """The shortest distinct names of the recordings; the longest ones if those are not distinct either."""
        longest = max((len(source.titles) for source in self.snapshots), default=0)
        names: tuple[str, ...] = ()
        for level in range(longest):
            names = tuple(source.titles[min(level, len(source.titles) - 1)] for source in self.snapshots)
            if len(set(names)) == len(names):
                break
        return names


def read_sources(paths: Iterable[Path]) -> Sources:
    """Sort files and folders by their contents, and read all but the recordings.

    A folder belongs to a sweep (results.jsonl) or to a run (result.json, snapshot.pickle), or contains only a
    recording. A file contains the rows of a sweep, one result, bench records, or a memory snapshot.

    Raises:
        ResultFormatError, RunDirectoryError, BenchFileError: a path is none of these.
    """
    cell_files: list[Path] = []
    snapshots: list[SnapshotSource] = []
    findings: list[list[Finding]] = []
    runs: list[Cell] = []
    for path in paths:
        if path.is_dir() and not (path / RESULTS_NAME).exists():
            run, recording = _read_run(path)
            runs += run
            snapshots += recording
        elif path.is_dir() or starts_as_json(path, _RESULTS):
            if not path.is_dir() and _is_bench(path):
                findings.append(read_lines(path))
            else:
                cell_files.append(path)
        else:
            snapshots.append(SnapshotSource(path=path, titles=(path.name.partition(".")[0],)))
    cells = (*read_cells(cell_files), *runs)
    return Sources(cells=cells, snapshots=tuple(snapshots), findings=join_findings(*findings))


def _read_run(path: Path) -> tuple[list[Cell], list[SnapshotSource]]:
    """The result and the recording of a run directory, if it contains them."""
    snapshot = path / SNAPSHOT_NAME
    if not (path / RESULT).exists():
        if not snapshot.exists():
            raise ResultFormatError(
                f"{path}: neither {RESULTS_NAME} nor {RESULT} nor {SNAPSHOT_NAME} in it. Give a sweep or a run."
            )
        return [], [SnapshotSource(path=snapshot, titles=(path.name,))]
    cell = cell_from_json(read_result(path), str(path / RESULT))
    recipe = cell.recipe
    kernels = kernel_set(recipe)
    provided = f"{kernels}, {recipe.provider_names}" if recipe.kernels else kernels
    titles = (kernels, provided, f"{kernels}, {recipe.batch} x {recipe.seq}", path.name)
    origin = cell.figures.backend if cell.figures is not None else ""
    recording = [SnapshotSource(path=snapshot, titles=titles, origin=origin)] if snapshot.exists() else []
    return [cell], recording


def _is_bench(path: Path) -> bool:
    """Whether the first line is a bench record; invalid lines are left to the other reader's errors."""
    with path.open("rb") as file:
        line = file.readline(_LONGEST_LINE)
    try:
        first = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(first, dict) and "what" in first and "recipe" not in first
