"""Progress of a command on stderr: a line that changes on a terminal, otherwise one line per stage."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ligerprof.cli.output import say


class Stages:
    """A callback that receives the name of each stage as it starts; without a terminal it prints the names."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show

    def __call__(self, stage: str) -> None:
        """Start a stage."""
        self._show(stage)

    def remaining(self, count: int) -> None:
        """About so many more stages of the longest kind will follow; shown as time on a terminal."""

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Print something else inside."""
        yield

    def attempt(self, number: int, most: int) -> None:
        """Show on a terminal that attempt `number` of at most `most` starts; any attempt may be the last."""


class _ShownStages(Stages):
    """Stages in a line of a terminal.

    Args:
        update: shows a stage and the time that is left.
        total: number of stages, or None.
        pauses: hides the line, and shows it again.
    """

    def __init__(
        self,
        update: Callable[[str, str], None],
        total: int | None,
        now: Callable[[], float] = time.monotonic,
        pauses: tuple[Callable[[], None], Callable[[], None]] | None = None,
    ) -> None:
        super().__init__(self._start)
        self._update, self._total, self._now = update, total, now
        self._pauses = pauses
        self._started = now()
        self._done, self._stage = -1, ""
        self._first_count: int | None = None
        self._attempt = self._left = ""

    def _start(self, stage: str) -> None:
        self._done, self._stage = self._done + 1, stage
        if self._first_count is None:
            self._left = self._attempt or time_left(self._done, self._total, self._now() - self._started)
        self._update(self._stage, self._left)

    def remaining(self, count: int) -> None:
        # a count may grow when the search learns more
        self._first_count = max(count, self._first_count or 0)
        self._left = about_left(self._first_count - count, count, self._now() - self._started)
        self._update(self._stage, self._left)

    @contextmanager
    def aside(self) -> Iterator[None]:
        hide, show = self._pauses or (_do_nothing, _do_nothing)
        hide()
        yield
        show()

    def attempt(self, number: int, most: int) -> None:
        self._attempt = f"change {number} of at most {most}: "


@contextmanager
def stages(total: int | None = None, *, piped: Callable[[str], None] = say) -> Iterator[Stages]:
    """A callback that receives the name of each stage as it starts.

    Args:
        total: number of stages, for the time that is left; None if it is unknown.
        piped: receives the names if stderr is not a terminal.
    """
    if not sys.stderr.isatty():
        yield Stages(piped)
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
        SpinnerColumn(),
        TimeElapsedColumn(),
        text,
        console=Console(stderr=True),
        expand=True,
        transient=True,
        # results go to stdout, which may be a file
        redirect_stdout=False,
    ) as shown:
        task = shown.add_task("", total=None, left="")
        yield _ShownStages(
            lambda stage, left: shown.update(task, description=printable(stage), left=left),
            total,
            pauses=(shown.stop, shown.start),
        )


def _do_nothing() -> None:
    pass


def about_left(done: int, left: int, seconds: float) -> str:
    """Such as `about 8 s left: `, from the mean so far; nothing before the first is done, and after the last.

    Args:
        seconds: taken by those that are done.
    """
    return f"about {seconds / done * left:.0f} s left: " if done and left else ""


def time_left(done: int, total: int | None, seconds: float) -> str:
    """Such as `3 of 12 done, 20 s left: `; without a total only the number of stages that are done.

    Args:
        seconds: taken by the stages that are done.
    """
    if total is None:
        return f"{done} done, now " if done else ""
    left = f", {seconds / done * (total - done):.0f} s left" if done else ""
    return f"{done} of {total} done{left}: "
