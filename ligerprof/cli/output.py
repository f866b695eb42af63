"""How commands write: results to stdout, all else to stderr."""

import json
from collections.abc import Mapping
from typing import Any

import click


def print_json(result: Mapping[str, Any]) -> None:
    """Print one JSON object to stdout, nothing else."""
    click.echo(json.dumps(result, indent=2))


def say(text: str) -> None:
    """Tell the user what is going on, on stderr."""
    click.echo(text, err=True)
