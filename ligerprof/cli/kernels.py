"""`ligerprof kernels`: the fused kernels and where they can run."""

import click

from ligerprof.cli.common_options import json_option
from ligerprof.cli.output import print_json
from ligerprof.kernels.registry import load_registry
from ligerprof.models import load_model
from ligerprof.reports.kernels import kernels_json, list_states, render_kernels
from ligerprof.reports.terminal import console


@click.command()
@click.option("--model", metavar="NAME|PATH", help="Also show which kernels apply to this model.")
@json_option
def command(model: str | None, as_json: bool) -> None:
    """List the fused kernels and where they can run.

    The list includes kernels of installed plug-ins, and broken plug-ins with the error.
    """
    listing = list_states(load_registry(), load_model(model) if model is not None else None)
    if as_json:
        print_json(kernels_json(listing))
    else:
        console().print(render_kernels(listing))
