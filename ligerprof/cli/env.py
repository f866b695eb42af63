"""`ligerprof env`: package versions and GPUs."""

import click

from ligerprof.cli.command import DocumentedCommand
from ligerprof.cli.common_options import json_option
from ligerprof.cli.output import show


@click.command(cls=DocumentedCommand, name="env")
@json_option
def command(as_json: bool) -> None:
    """Show package versions and GPUs.

    Include the output in bug reports.
    """
    from ligerprof.reports.env import environment_json, read_environment, render_environment

    environment = read_environment()
    show(lambda: environment_json(environment), lambda: render_environment(environment), as_json=as_json)
