"""`ligerprof models`: the built-in models."""

import click

from ligerprof.cli.common_options import json_option
from ligerprof.cli.output import show
from ligerprof.models import CONFIGS, load_model
from ligerprof.reports.models import models_json, models_table


@click.command()
@json_option
def command(as_json: bool) -> None:
    """List the built-in models.

    Options that take a model name also accept the path of a config.json or of a model folder.
    """
    specs = [load_model(name) for name in CONFIGS]
    show(lambda: models_json(specs), lambda: models_table(specs), as_json=as_json)
