"""The option of explain and run that shows suggestions as changed lines of the user's own configuration file."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ligerprof.analyzers.explain.peak import PeakReport

own_file_option = click.option(
    "--config",
    "configs",
    multiple=True,
    metavar="FILE",
    help="The configuration that the training was started with (transformers, TRL, axolotl, LLaMA-Factory, DeepSpeed):"
    " suggestions then show the lines to change in this file. Repeatable.",
)


def lines_of_own_file(sources: tuple[str, ...]) -> "Callable[[PeakReport], PeakReport]":
    """Read the files of --config; the result puts their lines into the suggestions of a report."""
    if not sources:
        return lambda report: report
    from ligerprof.analyzers.suggestions.own_file import in_own_file, read_own_file

    own = read_own_file(sources)
    return lambda report: replace(report, suggestions=in_own_file(report.suggestions, own))
