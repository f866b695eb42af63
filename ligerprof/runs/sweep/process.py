"""Run one cell of a sweep in its own process, and make its result row."""

import dataclasses
import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
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
from ligerprof.runs.sweep.guard import GRACE_SECONDS

_DONE, _OUT_OF_MEMORY = 0, 3
_LOG_TAIL_BYTES = 4096
_LONGEST_ERROR = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class CellSettings:
    """How every cell of a sweep is run.

    Attributes:
        timeout_seconds: a cell that takes longer is ended and counts as failed; None: no limit.
        trace: whether measured cells are profiled for TensorBoard.
    """

    timeout_seconds: float | None = None
    trace: bool = False


class CellProcess:
    """A running cell."""

    def __init__(self, recipe: TrainingRecipe, folder: SweepFolder, settings: CellSettings) -> None:
        """Start it.

        Raises:
            RunDirectoryError: the disk refuses.
        """
        self.recipe, self.key = recipe, cell_key(recipe)
        self._folder, self._settings = folder, settings
        self._started = time.monotonic()
        self._timed_out = False
        with disk_errors_in_a_line(folder.path):
            self._process = self._start()

    def poll(self) -> dict[str, Any] | None:
        """The row if the cell has ended, else None; ends a cell whose time is up."""
        limit_seconds = self._settings.timeout_seconds
        if self._process.poll() is None and limit_seconds is not None and self._seconds() > limit_seconds:
            self._timed_out = True
            self.stop()
        return None if self._process.poll() is None else self._row()

    def words(self) -> str:
        """The last line of the cell's stderr."""
        return last_line(self._folder.log(self.key))

    def stop(self) -> None:
        """End the cell with all its processes."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(2 * GRACE_SECONDS)
        self._process.kill()
        self._process.wait()

    def _start(self) -> "subprocess.Popen[bytes]":
        with self._folder.output(self.key).open("wb") as output, self._folder.log(self.key).open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "ligerprof.runs.sweep.guard", *self._command()],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=log,
                start_new_session=True,
            )

    def _command(self) -> list[str]:
        config = self.recipe.deepspeed_config
        flags = recipe_flags(dataclasses.replace(self.recipe, deepspeed_config=None))
        if config is not None:
            file = self._folder.deepspeed_config(self.key)
            write_new_file(file, json.dumps(config), force=True)
            flags = (*flags, "--deepspeed-config", str(file))
        trace = "--trace" if self._settings.trace else "--no-trace"
        output = ("-o", str(self._folder.run(self.key)), "--force", "--json")
        return [sys.executable, "-m", "ligerprof", "step", *flags, trace, *output]

    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def _row(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.close()
        head = {"schema": 1, "kind": "cell", "key": self.key}
        seconds = round(self._seconds(), 3)
        code = self._process.returncode
        result = self._result() if code in (_DONE, _OUT_OF_MEMORY) else None
        if result is not None:
            status = CellStatus.DONE if result["oom"] is None else CellStatus.OOM
            return {**head, "status": status.value, "error": None, "seconds": seconds, **_without_head(result)}
        return {
            **head,
            "status": CellStatus.FAILED.value,
            "error": self._reason(code),
            "seconds": seconds,
            "recipe": self.recipe.to_json(),
            "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }

    def _result(self) -> dict[str, Any] | None:
        path = self._folder.output(self.key)
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


def last_line(path: Path) -> str:
    """The last line that is not blank, shortened; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:_LONGEST_ERROR]


def _without_head(result: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name not in ("schema", "kind")}
