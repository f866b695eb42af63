"""Output of commands: results to stdout, everything else to stderr."""

import json
from collections.abc import Mapping
from typing import Any

import click


def print_json(result: Mapping[str, Any]) -> None:
    """Print one JSON object to stdout."""
    click.echo(json.dumps(result, indent=2))


def say(text: str) -> None:
    """Print a status message to stderr."""
    click.echo(text, err=True)
