"""Output of commands: results to stdout, everything else to stderr."""

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ligerprof.errors import OutputError
from ligerprof.text import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

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


def say(text: str) -> None:
    """Print a status message to stderr."""
    click.echo(printable(text, keep="\n"), err=True)
