"""Output of commands: results to stdout, everything else to stderr."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from ligerprof.reports.terminal import console
from ligerprof.serialization import to_text
from ligerprof.text import printable

if TYPE_CHECKING:
    from rich.console import RenderableType


def show(
    to_json: Callable[[], Mapping[str, Any]], render: "Callable[[], str | RenderableType]", *, as_json: bool
) -> None:
    """Print a result to stdout, as one JSON object or as text for the terminal."""
    if as_json:
        print_json(to_json())
    else:
        console().print(render())


def print_json(result: Mapping[str, Any]) -> None:
    """Print one JSON object to stdout."""
    click.echo(to_text(result))


def say(text: str) -> None:
    """Print a status message to stderr."""
    click.echo(printable(text, keep="\n"), err=True)
