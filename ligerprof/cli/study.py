"""`ligerprof study`: grids and the report of a study, by the script beside the study files in the repository."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from ligerprof.cli.command import DocumentedCommand
from ligerprof.errors import MissingDependencyError

_REPOSITORY = Path(__file__).parents[2]
_SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True}


def _script() -> Any:
    """The command of benchmarks/study; None where the package is installed without the repository."""
    if not (_REPOSITORY / "benchmarks" / "study" / "command.py").is_file():
        return None
    sys.path.append(str(_REPOSITORY))
    return import_module("benchmarks.study.command").command


@click.command(cls=DocumentedCommand, name="study", context_settings=_SETTINGS)
def _absent() -> None:
    """Run the grids of a study file and report them; needs a checkout of ligerprof's repository."""
    raise MissingDependencyError(
        "study: its script is benchmarks/study of ligerprof's repository, which is not installed with the package."
        " Clone the repository, and run `ligerprof study` there."
    )


command = _script() or _absent
