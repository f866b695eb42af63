"""The cells of a sweep: grids of options, their files and rows."""

import dataclasses
import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ligerprof.analyzers.compare import Figures, ResultReader
from ligerprof.errors import LigerprofError, RecipeError, ResultFormatError, RunDirectoryError
from ligerprof.files import FileKind, parse_json, read_json, read_text, write_new_file
from ligerprof.recipe.categories import Attention, Axis
from ligerprof.recipe.training import RECIPE_OPTIONS, TrainingRecipe
from ligerprof.serialization import document
from ligerprof.units import format_bytes
from ligerprof.words import Word

# at each size these vary fastest: steps that are compared with each other run one after the other
KERNEL_OPTIONS = ("liger", "provider", "flce_budget")
AXES = tuple(Axis)
# weeks of training steps; looking at more takes minutes
_MOST_COMBINATIONS = 100_000
_ALWAYS_SHOWN = (*AXES, "liger", "provider")
_DEFAULTS: dict[str, Any] = {name: declared.default for name, declared in RECIPE_OPTIONS.items()}
# in the keys of files: recipes settle the default, and sdpa was it before
_LEFT_OUT: dict[str, Any] = {**_DEFAULTS, "attention": Attention.SDPA}


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Values of recipe options; every combination is a training step.

    Attributes:
        options: recipe fields, each with at least one value; absent fields keep their default.
        variants: values of fields that change together, such as kernels and their provider; each is combined with
            every combination of the options.
    """

    options: Mapping[str, tuple[Any, ...]]
    variants: tuple[Mapping[str, Any], ...] = ({},)

    @property
    def size(self) -> int:
        """Number of combinations."""
        return math.prod(map(len, self.options.values())) * len(self.variants)

    def combinations(self) -> Iterator[dict[str, Any]]:
        """The values of each step: sizes ascending, and all kernels of a size before the next size."""
        kernels = [name for name in self.options if name in KERNEL_OPTIONS]
        sizes = [name for name in self.options if name in AXES]
        others = [name for name in self.options if name not in (*KERNEL_OPTIONS, *AXES)]
        for other, size, kernel, variant in itertools.product(
            self._products(others), sorted(self._products(sizes), key=_tokens), self._products(kernels), self.variants
        ):
            yield {**other, **size, **kernel, **variant}

    def _products(self, names: Sequence[str]) -> list[dict[str, Any]]:
        return [
            dict(zip(names, values, strict=True)) for values in itertools.product(*map(self.options.__getitem__, names))
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A combination that cannot be trained, and the reason."""

    options: Mapping[str, Any]
    reason: str


def expand(
    grids: Iterable[Grid], inspect: Callable[[TrainingRecipe], None]
) -> tuple[tuple[TrainingRecipe, ...], tuple[Refusal, ...]]:
    """The recipes of all grids in order, without duplicates, and the combinations that cannot be trained.

    Args:
        inspect: raises a LigerprofError for a recipe that cannot run here.

    Raises:
        RecipeError: there are too many combinations.
    """
    grids = tuple(grids)
    if (count := sum(grid.size for grid in grids)) > _MOST_COMBINATIONS:
        raise RecipeError(f"the grid has {count:,} combinations, more than {_MOST_COMBINATIONS:,}. Name fewer values.")
    recipes: dict[str, TrainingRecipe] = {}
    refusals = []
    for values in itertools.chain.from_iterable(grid.combinations() for grid in grids):
        try:
            recipe = without_unused_options(TrainingRecipe(**values))
            inspect(recipe)
        except LigerprofError as error:
            refusals.append(Refusal(options=values, reason=str(error)))
        else:
            recipes.setdefault(cell_key(recipe), recipe)
    return tuple(recipes.values()), tuple(refusals)


def without_unused_options(recipe: TrainingRecipe) -> TrainingRecipe:
    """The recipe with options of unused kernels reset to their defaults, so that equal steps run once."""
    unused = () if "flce" in recipe.kernels else ("flce_budget",) if recipe.kernels else ("provider", "flce_budget")
    changes = {name: _DEFAULTS[name] for name in unused if getattr(recipe, name) != _DEFAULTS[name]}
    # a study asks for each cell many times, and a new recipe checks all of its options
    return dataclasses.replace(recipe, **changes) if changes else recipe


def cell_key(recipe: TrainingRecipe) -> str:
    """The key that identifies a step: 16 hex digits, a hash of the whole recipe.

    Options at their defaults are left out, so that keys stay the same when a later version adds an option.
    """
    values = {
        name: value for name, value in recipe.to_json().items() if name == "model" or value != _LEFT_OUT.get(name)
    }
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def describe(recipe: TrainingRecipe, distinguishing: Iterable[str]) -> str:
    """A step in a few words: its size, its kernels, and the options that distinguish it from others."""
    kernels = f"{recipe.liger} ({recipe.provider_names})" if recipe.kernels else "no kernels"
    others = [option_text(recipe, name) for name in distinguishing if name not in _ALWAYS_SHOWN]
    return ", ".join([f"{recipe.batch} x {recipe.seq}", kernels, *others])


def distinguishing_options(recipes: Iterable[TrainingRecipe]) -> tuple[str, ...]:
    """The fewest fields that distinguish the recipes: size and kernels, the model if it differs, then others."""
    found = tuple(recipes)
    columns = {name: [option_text(recipe, name) for recipe in found] for name in _DEFAULTS}
    shown = [*_ALWAYS_SHOWN, *(["model"] if len(set(columns["model"])) > 1 else [])]
    for name in columns:
        if _classes(columns, [*shown, name]) > _classes(columns, shown):
            shown.append(name)
    return tuple(shown)


def _classes(columns: Mapping[str, list[str]], names: list[str]) -> int:
    return len(set(zip(*(columns[name] for name in names), strict=True)))


def option_text(recipe: TrainingRecipe, name: str) -> str:
    """An option of a recipe in words."""
    value = getattr(recipe, name)
    if name == "model":
        return recipe.spec.name
    if name == "memory_limit_bytes":
        return "no limit" if value is None else f"limit {format_bytes(value)}"
    return f"{name.replace('_', ' ')} {value}"


def _tokens(size: Mapping[str, int]) -> tuple[int, int]:
    batch, seq = (size.get(name, _DEFAULTS[name]) for name in AXES)
    return batch * seq, batch


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
    """The parsed lines of a file, or of a folder's results.jsonl, each with its source; raises ResultFormatError."""
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
    """The cell of an untrusted row; raises ResultFormatError, with `source`, for anything else."""
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
        """Make the folder unless it exists; raises RunDirectoryError if it contains something else."""
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
        """The cells so far by key, the later of two rows; raises ResultFormatError for a line that no sweep wrote."""
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
        """Add grids to sweep.json, without duplicates; raises ResultFormatError if it contains something else."""
        path = self.path / GRIDS
        known = read_json(path, _GRIDS_FILE).get("grids") if path.exists() else []
        if not isinstance(known, list):
            raise ResultFormatError(f"{path}: not written by a sweep. Choose another -o.")
        content = document("grids", {"grids": known + [grid for grid in grids if grid not in known]})
        write_new_file(path, json.dumps(content, indent=2) + "\n", force=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other sweeps out until the process ends; raises RunDirectoryError if another is running here."""
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
