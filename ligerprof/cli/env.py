"""`ligerprof env`: package versions and GPUs."""

import click

from ligerprof.cli.common_options import json_option
from ligerprof.cli.output import print_json
from ligerprof.reports.env import environment_json, read_environment, render_environment
from ligerprof.reports.terminal import console


@click.command()
@json_option
def command(as_json: bool) -> None:
    """Show package versions and GPUs.

    Include the output in bug reports.
    """
    environment = read_environment()
    if as_json:
        print_json(environment_json(environment))
    else:
        console().print(render_environment(environment))
