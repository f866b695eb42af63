"""`ligerprof models`: the models of the catalog."""

import click

from ligerprof.cli.command import DocumentedCommand
from ligerprof.cli.common_options import complete_models, json_option
from ligerprof.cli.output import show
from ligerprof.errors import UnknownModelError
from ligerprof.models import CATALOG
from ligerprof.models.names import models_without_config, names_like
from ligerprof.text import short_repr
from ligerprof.words import did_you_mean


@click.command(cls=DocumentedCommand, name="models")
@click.argument("text", nargs=-1, shell_complete=complete_models)
@json_option
def command(text: tuple[str, ...], as_json: bool) -> None:
    """List models by hub id, and show their figures.

    With TEXT, show the figures of the models whose names contain it. Options that take a model also accept the path of
    a config.json or of a model folder, and the hub id of a model in the local Hugging Face cache.
    """
    from ligerprof.reports.models import find_models, models_json, render_figures, render_names

    searched = " ".join(text)
    found = find_models(CATALOG, models_without_config().values(), searched)
    if not found.rows and not found.unsupported:
        meant = did_you_mean(searched, names_like(searched))
        raise UnknownModelError(
            f"no model has {short_repr(searched)} in its name.{meant} Run `ligerprof models` for all."
        )
    show(
        lambda: models_json(found), lambda: render_figures(found) if searched else render_names(found), as_json=as_json
    )
