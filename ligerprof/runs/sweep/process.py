"""Run one cell of a sweep in its own process, and make its result row."""

import dataclasses
import json
import os
import signal
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ligerprof.files import write_new_file
from ligerprof.recipe.flags import recipe_flags
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.sweep.cells import CellStatus
from ligerprof.runs.sweep.folder import SweepFolder, disk_errors_in_a_line
from ligerprof.runs.sweep.grid import cell_key
from ligerprof.runs.sweep.starting import CellStarter, Command
from ligerprof.serialization import document

# done and out of memory
_EXIT_CODES_WITH_RESULT = (0, 3)
_LOG_TAIL_BYTES = 4096
_LONGEST_ERROR = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepSettings:
    """How to run the cells of a sweep.

    Attributes:
        timeout_seconds: time limit per cell; a cell that exceeds it is ended and counts as failed.
        trace: profile measured cells for TensorBoard.
        jobs: number of cells that run at once.
        stop_at_oom: skip cells that are larger than one of the same line that was out of memory.
        again: run finished cells again.
    """

    timeout_seconds: float | None = None
    trace: bool = False
    jobs: int = 1
    stop_at_oom: bool = False
    again: bool = False


class CellProcess:
    """A running cell.

    Raises:
        RunDirectoryError: its files cannot be written.
    """

    def __init__(
        self, recipe: TrainingRecipe, folder: SweepFolder, settings: SweepSettings, starter: CellStarter
    ) -> None:
        self.recipe, self.key = recipe, cell_key(recipe)
        self._folder, self._settings = folder, settings
        self._started = time.monotonic()
        self._timed_out = False
        files = {"output": self._file("out"), "log": self._file("log")}
        with disk_errors_in_a_line(folder.path):
            self._running = starter.start(Command(words=self._words(), recipe=recipe, **files))

    def poll(self) -> dict[str, Any] | None:
        """The row if the cell has ended, else None; ends a cell that exceeds its time limit."""
        limit_seconds = self._settings.timeout_seconds
        code = self._running.poll()
        if code is None and limit_seconds is not None and self._seconds() > limit_seconds:
            self._timed_out = True
            self.stop()
            code = self._running.poll()
        return None if code is None else self._row(code)

    def words(self) -> str:
        """The last line of the cell's stderr that is not blank, shortened; empty if there is none."""
        try:
            with self._file("log").open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(0, end - _LOG_TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")[:_LONGEST_ERROR]

    def stop(self) -> None:
        """End the cell and all its processes."""
        self._running.stop()

    def _words(self) -> tuple[str, ...]:
        """The words of the cell's command after `python`."""
        config = self.recipe.deepspeed_config
        flags = recipe_flags(dataclasses.replace(self.recipe, deepspeed_config=None))
        if config is not None:
            file = self._file("deepspeed.json")
            write_new_file(file, json.dumps(config), force=True)
            flags = (*flags, "--deepspeed-config", str(file))
        trace = "--trace" if self._settings.trace else "--no-trace"
        output = ("-o", str(self._folder.runs / self.key), "--force", "--json")
        return ("-m", "ligerprof", "step", *flags, trace, *output)

    def _file(self, suffix: str) -> Path:
        return self._folder.runs / f"{self.key}.{suffix}"

    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def _row(self, code: int) -> dict[str, Any]:
        result = self._result() if code in _EXIT_CODES_WITH_RESULT else None
        if result is not None:
            status = CellStatus.DONE if result["oom"] is None else CellStatus.OOM
            error = None
        else:
            status, error = CellStatus.FAILED, self._reason(code)
            now = datetime.now(timezone.utc).isoformat(timespec="seconds")
            result = {"recipe": self.recipe.to_json(), "finished": now}
        head = {"key": self.key, "status": status.value, "error": error, "seconds": round(self._seconds(), 3)}
        # the keys of a step's result, but not its kind, nor a failure's hundreds of blocks
        if isinstance(result.get("oom"), dict):
            result["oom"].pop("blocks", None)
        return {**document("cell", head), **{name: value for name, value in result.items() if name != "kind"}}

    def _result(self) -> dict[str, Any] | None:
        path = self._file("out")
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        path.unlink()
        return result if isinstance(result, dict) and "oom" in result else None

    def _reason(self, code: int) -> str:
        if self._timed_out:
            return f"took longer than {self._settings.timeout_seconds:g} s and was ended"
        words = self.words().removeprefix("Error: ")
        if abs(code) in (128 + signal.SIGKILL, signal.SIGKILL):
            return f"killed (signal 9; did the host run out of memory?) after: {words}"
        return words or f"ended with exit code {code} and printed nothing"
