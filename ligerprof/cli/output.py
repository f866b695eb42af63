"""Output of commands: results to stdout, everything else, such as progress, to stderr."""

import errno
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ligerprof.errors import OutputError
from ligerprof.files import write_new_file
from ligerprof.text import printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress

    from ligerprof.recipe.configs.report import ConfigReport

# what a result says about a limit, which is left open where files do not say what they train
_JUDGEMENTS = frozenset({"fits", "verdict"})
_CONFIG, _SOURCES, _SAID = "ligerprof.config", "ligerprof.sources", "ligerprof.said_method"


def show(
    to_json: Callable[[], Mapping[str, Any]], render: "Callable[[], str | RenderableType]", *, as_json: bool
) -> None:
    """Print a result to stdout, as one JSON object or as text for the terminal; raises OutputError if that fails."""
    report = config_report()
    if as_json:
        result = dict(to_json())
        if not knows_method():
            result = {**_unjudged(result), **dict.fromkeys(_JUDGEMENTS & result.keys())}
        print_json({**result, **({} if report is None else {"config": report.to_json()})})
    else:
        print_text(render())


def print_text(text: "str | RenderableType") -> None:
    """Print a part of a result to stdout; raises OutputError if that fails.

    The first part says whether the command's files do not name what they train.
    """
    from ligerprof.recipe.configs.report import UNNAMED_METHOD
    from ligerprof.reports.terminal import console

    with _written():
        if not knows_method() and _SAID not in (meta := click.get_current_context().meta):
            meta[_SAID] = True
            console().print(UNNAMED_METHOD)
        console().print(text)


def print_markdown(text: str) -> None:
    """Print a result as Markdown to stdout; raises OutputError if that fails."""
    from ligerprof.recipe.configs.report import UNNAMED_METHOD

    with _written():
        click.echo(text if knows_method() else f"{UNNAMED_METHOD}\n\n{text}")


def _unjudged(value: Any) -> Any:
    """A result whose judgements are null."""
    if isinstance(value, Mapping):
        judged = {key for key in _JUDGEMENTS & value.keys() if not isinstance(value[key], Mapping)}
        return {key: None if key in judged else _unjudged(item) for key, item in value.items()}
    return [_unjudged(item) for item in value] if isinstance(value, list | tuple) else value


def limit_json(limit_bytes: int | None, peak_bytes: int, *, failed: bool = False) -> dict[str, Any]:
    """The keys of a result about a limit on a peak that was recorded, and whether memory ran out; null without one."""
    from ligerprof.analyzers.estimate.judge import judge

    answer = None if limit_bytes is None else judge(limit_bytes, lambda limit: not failed and peak_bytes <= limit)
    return {
        "limit_bytes": limit_bytes,
        "fits": None if answer is None else answer.fits,
        "verdict": None if answer is None else answer.value,
    }


def keep_config_report(report: "ConfigReport", sources: Sequence[str], given: Mapping[str, Any]) -> None:
    """Keep what became of the keys of --config files, and what they were read with, for the running command."""
    meta = click.get_current_context().meta
    meta[_CONFIG], meta[_SOURCES] = report, (sources, given)


def config_report() -> "ConfigReport | None":
    """What became of the keys of the running command's --config files; None without --config."""
    context = click.get_current_context(silent=True)
    return None if context is None else context.meta.get(_CONFIG)


def knows_method() -> bool:
    """Whether the running command's --config files say what they train, or there are none."""
    report = config_report()
    return report is None or report.method is not None


def config_sources() -> tuple[Sequence[str], Mapping[str, Any]]:
    """The running command's --config files as typed, and the options next to them; empty without --config."""
    found: tuple[Sequence[str], Mapping[str, Any]] = click.get_current_context().meta.get(_SOURCES, ((), {}))
    return found


def print_json(result: Mapping[str, Any]) -> None:
    """Print one JSON object to stdout; raises OutputError if that fails."""
    text = json.dumps(result, indent=2)
    with _written():
        click.echo(text)


@contextmanager
def _written() -> Iterator[None]:
    """Turn a full or closed stdout into an OutputError; click ends the command if a pipe's reader is gone."""
    if sys.stdout is None:
        raise OutputError("standard output is closed. Redirect it to a file.")
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        # what is still buffered would fail again at exit
        with suppress(OSError), Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        raise OutputError(f"standard output: cannot be written ({error.strerror}). Redirect it elsewhere.") from None


def say_written(path: Path | str, more: str = "") -> None:
    """Say in one line, whatever the file is called, that it has been written."""
    say(f"wrote {printable(str(path))}{more}")


def write_output(path: Path, content: bytes | str, *, force: bool, more: str = "") -> None:
    """Write a file that an option names, as `write_new_file` does, and say so, and whether its folder is new."""
    made = "" if path.parent.exists() else ", in a new folder"
    write_new_file(path, content, force=force)
    say_written(path, f"{made}{more}")


def say(text: str) -> None:
    """Print a status message to stderr."""
    click.echo(printable(text, keep="\n"), err=True)


class Stages:
    """A callback that receives the name of each stage as it starts.

    Args:
        show: receives the name, and in words what is done and the time that is left.
        line: the line of a terminal that shows them; None without a terminal, where only names are shown.
    """

    def __init__(
        self, show: Callable[[str, str], None], total: int | None = None, line: "Progress | None" = None
    ) -> None:
        self._show, self._total, self._line = show, total, line
        self._started = time.monotonic()
        self._done, self._stage = -1, ""
        self._first_count: int | None = None
        self._attempt = self._left = ""

    def __call__(self, stage: str) -> None:
        """Start a stage."""
        self._done, self._stage = self._done + 1, stage
        if self._first_count is None:
            self._left = self._attempt or time_left(self._done, self._total, time.monotonic() - self._started)
        self._show(stage, self._left)

    def remaining(self, count: int) -> None:
        """About so many more stages of the longest kind will follow; shown as time on a terminal."""
        # a count may grow when the search learns more
        self._first_count = max(count, self._first_count or 0)
        self._left = about_left(self._first_count - count, count, time.monotonic() - self._started)
        if self._line is not None:
            self._show(self._stage, self._left)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Print something else inside."""
        if self._line is None:
            yield
            return
        self._line.stop()
        yield
        self._line.start()

    def attempt(self, number: int, most: int) -> None:
        """Show on a terminal that attempt `number` of at most `most` starts; any attempt may be the last."""
        self._attempt = f"change {number} of at most {most}: "


@contextmanager
def stages(total: int | None = None, *, piped: Callable[[str], None] = say) -> Iterator[Stages]:
    """A callback that receives the name of each stage of `total` as it starts; `piped` gets them without a terminal."""
    if not sys.stderr.isatty():
        yield Stages(lambda stage, _left: piped(stage))
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

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
        yield Stages(lambda stage, left: shown.update(task, description=printable(stage), left=left), total, line=shown)


def about_left(done: int, left: int, seconds: float) -> str:
    """Such as `about 8 s left: `, from the `seconds` of those done; nothing before the first and after the last."""
    return f"about {seconds / done * left:.0f} s left: " if done and left else ""


def time_left(done: int, total: int | None, seconds: float) -> str:
    """Such as `3 of 12 done, 20 s left: `, from the `seconds` of those done; without a total their number alone."""
    if total is None:
        return f"{done} done, now " if done else ""
    left = f", {seconds / done * (total - done):.0f} s left" if done else ""
    return f"{done} of {total} done{left}: "
