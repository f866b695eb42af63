"""The options of explain and run that show and write suggestions as changes of the user's own configuration files."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ligerprof.cli.changed_copies import check_copies, write_copies
from ligerprof.cli.output import say
from ligerprof.errors import RecipeError

if TYPE_CHECKING:
    from ligerprof.analyzers.explain.peak import PeakReport
    from ligerprof.recipe.configs.edits import OwnFiles

own_file_option = click.option(
    "--config",
    "configs",
    multiple=True,
    metavar="FILE",
    help="The configuration that the training was started with (transformers, TRL, axolotl, LLaMA-Factory, torchtitan,"
    " accelerate, DeepSpeed): suggestions then show the lines to change in this file. Repeatable.",
)


class OwnConfig:
    """The files of --config, and where to write changed copies.

    Raises:
        RecipeError: a file cannot be read, or none can be edited.
        OutputError: copies were asked for and cannot be written.
    """

    def __init__(self, sources: Sequence[str], copies: Sequence[Path], *, force: bool) -> None:
        self._copies, self._force = copies, force
        self._own: OwnFiles | None = None
        if sources:
            from ligerprof.analyzers.suggestions.own_file import read_own_files

            self._own = read_own_files(sources)
        check_copies(copies, () if self._own is None else self._own.files, force=force)

    def in_files(self, report: "PeakReport") -> "PeakReport":
        """The report with the lines of the files in its suggestions."""
        if self._own is None:
            return report
        from ligerprof.analyzers.suggestions.own_file import in_own_files

        return replace(report, suggestions=in_own_files(report.suggestions, self._own))

    def write(self, report: "PeakReport | None") -> None:
        """Write copies of the files with the first suggestion that they have keys for."""
        if self._own is None or not self._copies:
            return
        from ligerprof.analyzers.suggestions.own_file import first_edits

        found = None if report is None else first_edits(report.suggestions, self._own)
        if found is None:
            lacking = "the --config files have no keys for the suggestions" if report else "nothing was recorded"
            say(f"{self._copies[0]} is not written: {lacking}")
            return
        suggestion, edits = found
        say(f"the first suggestion that the file has keys for: {suggestion.change}")
        try:
            write_copies(edits, self._copies, force=self._force)
        except RecipeError as error:
            # the command's own result stands
            say(f"{self._copies[0]} is not written: {error}")
