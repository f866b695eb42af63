"""Progress of a command on stderr: a line that changes on a terminal, otherwise one line per stage."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ligerprof.cli.output import say


@contextmanager
def stages(total: int | None = None, *, piped: Callable[[str], None] = say) -> Iterator[Callable[[str], None]]:
    """A callback that receives the name of each stage as it starts.

    Args:
        total: number of stages, for the time that is left; None if it is unknown.
        piped: receives the names if stderr is not a terminal.
    """
    if not sys.stderr.isatty():
        yield piped
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    from ligerprof.text import printable

    text = TextColumn(
        "{task.fields[left]}{task.description}",
        markup=False,
        table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
    )
    with Progress(
        SpinnerColumn(), TimeElapsedColumn(), text, console=Console(stderr=True), expand=True, transient=True
    ) as shown:
        started, task = time.monotonic(), shown.add_task("", total=None, left="")
        done = -1

        def show(stage: str) -> None:
            nonlocal done
            done += 1
            left = time_left(done, total, time.monotonic() - started)
            shown.update(task, description=printable(stage), left=left)

        yield show


def time_left(done: int, total: int | None, seconds: float) -> str:
    """Such as `3 of 12 done, 20 s left: `; without a total only the number of stages that are done.

    Args:
        seconds: taken by the stages that are done.
    """
    if total is None:
        return f"{done} done, now " if done else ""
    left = f", {seconds / done * (total - done):.0f} s left" if done else ""
    return f"{done} of {total} done{left}: "
