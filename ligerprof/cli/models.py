"""`ligerprof models`: the built-in models."""

import click

from ligerprof.cli.common_options import json_option
from ligerprof.cli.output import print_json
from ligerprof.models import CONFIGS, load_model
from ligerprof.reports.models import models_json, models_table
from ligerprof.reports.terminal import console


@click.command()
@json_option
def command(as_json: bool) -> None:
    """List the built-in models.

    Options that take a model name also accept the path of a config.json or of a model folder.
    """
    specs = [load_model(name) for name in CONFIGS]
    if as_json:
        print_json(models_json(specs))
    else:
        console().print(models_table(specs))
