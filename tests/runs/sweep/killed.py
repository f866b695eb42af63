"""Kill a sweep with SIGKILL at many moments, and run it again: `python -m tests.runs.sweep.killed FOLDER`.

Cells answer at once. A moment is the number of a line of code in which the sweep is killed, or the number of bytes of
its second row that have been written. Prints a JSON object per moment.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from ligerprof.recipe.categories import Device
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.sweep import cells as folder_module
from ligerprof.runs.sweep import runner
from ligerprof.runs.sweep.cells import Grid, SweepFolder, cell_key
from ligerprof.runs.sweep.runner import SweepSettings, Watcher, make_plan, run_sweep

LINES, BYTES = 60, 12
PLAN = make_plan((Grid(options={"model": ("tiny",), "batch": (1, 2, 4), "device": (Device.SIMULATED,)}),))
WRITING = ("/ligerprof/runs/sweep/", "/ligerprof/files.py")


class Answered:
    """A cell that ends at once, and notes in a file that it ran."""

    log: Path

    def __init__(self, recipe: TrainingRecipe, *_: object) -> None:
        self.recipe, self.key = recipe, cell_key(recipe)
        with Answered.log.open("a") as file:
            file.write(f"{self.key}\n")

    def poll(self) -> dict[str, Any]:
        """The row."""
        return {"key": self.key, "status": "done", "recipe": self.recipe.to_json()}


def sweep(path: Path) -> None:
    """Run the sweep, or what is left of it."""
    run_sweep(PLAN, SweepFolder(path=path), SweepSettings(), Watcher())


def in_a_fork(action: Callable[[], object]) -> int:
    """The signal that ended an action, or 0."""
    process = os.fork()
    if process == 0:
        action()
        os._exit(0)
    return os.WTERMSIG(os.waitpid(process, 0)[1])


def counting(path: Path, kill_at: int) -> int:
    """Run the sweep until a line of the code that runs and writes it; returns the number of lines."""
    count = 0

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal count
        if not any(each in frame.f_code.co_filename for each in WRITING):
            return None
        if event == "line":
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    sweep(path)
    sys.settrace(None)
    return count


def killed_in_a_row(path: Path, written_bytes: int) -> None:
    """Run the sweep until so many bytes of its second row are in the file."""
    count = 0
    flush = os.fsync

    def cut(file: int) -> None:
        nonlocal count
        count += 1
        if count == 2:
            start = (path / "results.jsonl").read_bytes().index(b"\n") + 1
            os.truncate(file, start + written_bytes)
            os.kill(os.getpid(), signal.SIGKILL)
        flush(file)

    folder_module.os.fsync = cut  # type: ignore[attr-defined]
    sweep(path)


def main() -> None:
    """Kill, run again, and print what ran and what is in the file."""
    root = Path(sys.argv[1])
    runner.CellProcess = Answered  # type: ignore[misc, assignment]
    runner._POLL_SECONDS = 0
    Answered.log = root / "whole.log"
    total = counting(root / "whole", 0)
    row_bytes = len((root / "whole" / "results.jsonl").read_bytes().splitlines()[1])
    moments: list[tuple[str, Callable[[Path], object]]] = [
        *((f"line {at}", lambda path, at=at: counting(path, at)) for at in range(1, total, max(total // LINES, 1))),
        *(
            (f"byte {at}", lambda path, at=at: killed_in_a_row(path, at))
            for at in (*range(0, row_bytes, row_bytes // BYTES), row_bytes)
        ),
    ]
    for number, (moment, killed) in enumerate(moments):
        path = root / str(number)
        Answered.log = root / f"{number}.log"
        ended_by = in_a_fork(lambda killed=killed, path=path: killed(path))
        results = path / "results.jsonl"
        before = results.read_text() if results.exists() else ""
        ran_before = Answered.log.read_text().split() if Answered.log.exists() else []
        again = in_a_fork(lambda path=path: sweep(path))
        print(
            json.dumps(
                {
                    "moment": moment,
                    "ended_by": [ended_by, again],
                    "ran": [ran_before, Answered.log.read_text().split()[len(ran_before) :]],
                    "rows": [before, results.read_text()],
                    "keys": [cell_key(recipe) for recipe in PLAN.recipes],
                }
            )
        )


if __name__ == "__main__":
    main()
