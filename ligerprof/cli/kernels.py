"""`ligerprof kernels`: the fused kernels and where they can run."""

import click

from ligerprof.cli.common_options import json_option
from ligerprof.cli.output import show
from ligerprof.kernels.registry import load_registry
from ligerprof.models import load_model
from ligerprof.reports.kernels import kernels_json, list_states, render_kernels


@click.command()
@click.option("--model", metavar="NAME|PATH", help="Also show which kernels apply to this model.")
@json_option
def command(model: str | None, as_json: bool) -> None:
    """List the fused kernels and where they can run.

    The list includes kernels of installed plug-ins, and broken plug-ins with the error.
    """
    listing = list_states(load_registry(), load_model(model) if model is not None else None)
    show(lambda: kernels_json(listing), lambda: render_kernels(listing), as_json=as_json)
