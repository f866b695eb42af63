"""Read the result rows of sweeps: one training step per line, done, out of memory or failed."""

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ligerprof.analyzers.result_reader import Figures, ResultReader
from ligerprof.errors import LigerprofError, ResultFormatError
from ligerprof.files import FileKind, parse_json, read_text
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.words import Word

RESULTS_NAME = "results.jsonl"
# a row has about ten thousand bytes
_ROWS = FileKind(error=ResultFormatError, hint="Give a folder or file of `ligerprof sweep`.", max_bytes=256 * 2**20)


class CellStatus(Word):
    """How a cell ended."""

    DONE = "done"
    OOM = "oom"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One training step of a sweep.

    Attributes:
        key: identifies the cell; of two rows with one key the later counts.
        figures: peak, phases and roles, up to the failure if memory ran out; None if the row has no step.
        gpu: the GPU that was measured or simulated; "" if unknown.
        reserved_bytes: the highest reserved bytes of the steady step.
        limit_bytes: the limit on reserved bytes.
        step_seconds: median of the timed steps; None if simulated or not done.
    """

    key: str
    status: CellStatus
    recipe: TrainingRecipe
    error: str | None = None
    finished: datetime | None = None
    figures: Figures | None = None
    gpu: str = ""
    reserved_bytes: int | None = None
    limit_bytes: int | None = None
    step_seconds: float | None = None
    tokens_per_second: float | None = None


def read_cells(paths: Iterable[Path]) -> tuple[Cell, ...]:
    """Cells of JSON Lines files, or of folders that hold a results.jsonl; of rows with the same key the last counts.

    A line is what `ligerprof step --json` prints, with `kind` cell and the keys `key`, `status`, `error` and
    `seconds`; a plain step result is a cell that is done, or out of memory if it says so. An unfinished last
    line is skipped: it is still being written.

    Raises:
        ResultFormatError: a line was not written by step or sweep; the error names the file and the line.
    """
    cells: dict[str, Cell] = {}
    for path in paths:
        for source, row in read_rows(path):
            cell = cell_from_json(row, source)
            # a repeated row counts at its later place
            cells.pop(cell.key, None)
            cells[cell.key] = cell
    return tuple(cells.values())


def read_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """The parsed lines of a file, or of a folder's results.jsonl, each with its source for errors.

    Raises:
        ResultFormatError: the file cannot be read, or a line other than the last is not JSON.
    """
    file = path / RESULTS_NAME if path.is_dir() else path
    text = read_text(file, _ROWS)
    # one result over several lines, as `step --json` prints it
    lines = [text] if text.startswith("{\n") else text.split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        source = f"{file}, line {number}"
        try:
            values = parse_json(line, source, _ROWS)
        except ResultFormatError:
            # the last line of several, without its line end, is still being written or was cut off by a kill
            if number == len(lines) > 1:
                return
            raise
        yield source, values


def cell_from_json(values: object, source: str) -> Cell:
    """The cell of an untrusted row; `source` names the row in errors.

    Raises:
        ResultFormatError: it is not a row.
    """
    row = ResultReader(values, source)
    if (schema := row.get("schema")) not in (1, None):
        raise ResultFormatError(f"{source}: schema {schema!r:.40} is not 1. Was it written by another version?")
    if (kind := row.get("kind")) not in ("cell", "step", None):
        raise ResultFormatError(
            f"{source}: kind {kind!r:.40} is not a training step. Give a file that step or sweep wrote."
        )
    recipe = _recipe(row.get("recipe"), source)
    cell = Cell(
        key=row.text("key") or json.dumps(row.get("recipe"), sort_keys=True),
        status=_status(row, source),
        recipe=recipe,
        error=row.text("error"),
        finished=row.moment("finished"),
        limit_bytes=recipe.memory_limit_bytes,
    )
    if row.get("peak_bytes") is None:
        return cell
    oom = row.get("oom")
    return dataclasses.replace(
        cell,
        figures=row.figures(row.backend()),
        gpu=row.text("gpu") or "",
        reserved_bytes=row.size("reserved_bytes"),
        # an out-of-memory row has the limit even if it is the GPU's own
        limit_bytes=cell.limit_bytes if oom is None else ResultReader(oom, f"{source} (oom)").size("limit_bytes"),
        step_seconds=row.number("step_seconds"),
        tokens_per_second=row.number("tokens_per_second"),
    )


def _status(row: ResultReader, source: str) -> CellStatus:
    word = row.get("status")
    if word is None:
        return CellStatus.DONE if row.get("oom") is None else CellStatus.OOM
    try:
        return CellStatus(word)
    except ValueError:
        raise ResultFormatError(f"{source}: status {word!r:.40} is not one of {', '.join(CellStatus)}.") from None


def _recipe(values: object, source: str) -> TrainingRecipe:
    if not isinstance(values, dict):
        raise ResultFormatError(
            f"{source}: 'recipe' is missing or not an object. Give a file that step or sweep wrote."
        )
    disk = values.get("nvme_path")
    if isinstance(disk, str) and not Path(disk).is_dir():
        # the disk of the machine that ran it need not exist here; any folder will do
        values = {**values, "nvme_path": os.curdir}
    try:
        return TrainingRecipe.from_json(values)
    except (LigerprofError, TypeError, ValueError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ResultFormatError(f"{source}: not a recipe of this version ({reason}).") from None
