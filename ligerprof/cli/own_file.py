"""The --config files of a command: suggestions and searched changes as changes of them, and what they can say."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ligerprof.cli.common_options import FILE
from ligerprof.cli.options import was_given
from ligerprof.cli.output import config_report, config_sources, say, write_output
from ligerprof.errors import OutputError, RecipeError
from ligerprof.files import require_absent
from ligerprof.recipe.categories import Engine, ReduceDtype, Wrap
from ligerprof.recipe.configs.edits import FileEdit, OwnFiles, require_editable, switch_liger
from ligerprof.recipe.configs.sources import OWN
from ligerprof.recipe.configs.torchtitan import NAME as TORCHTITAN
from ligerprof.recipe.training import TrainingRecipe

if TYPE_CHECKING:
    from ligerprof.analyzers.explain.peak import PeakReport
    from ligerprof.analyzers.search.changes import Change, Sharding

_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def changed_copy_option(*names: str, what: str) -> _Decorator:
    """The option `copies`: a file per --config file that changes, in their order."""
    return click.option(
        *names,
        "copies",
        multiple=True,
        metavar="FILE",
        type=FILE,
        help=f"Write the --config file with {what} here; other lines and comments stay. Repeat it if several change.",
    )


def check_copies(copies: Sequence[Path], files: Sequence[tuple[str, str]], *, force: bool) -> None:
    """Raise OutputError if copies were asked for and no file can be rewritten, or a copy exists or is named twice."""
    if copies:
        require_editable(files)
        require_absent(copies, force=force)
        require_different(copies)


def require_different(copies: Sequence[Path]) -> None:
    """Raise OutputError if two copies have one name."""
    if len(set(map(os.path.realpath, copies))) < len(copies):
        raise OutputError(f"{', '.join(map(str, copies))}: two copies under one name. Name a file for each.")


def write_copies(edits: Sequence[FileEdit], copies: Sequence[Path], *, force: bool) -> None:
    """Write the changed files, or none if lines of one cannot be replaced (RecipeError); say what changes they lack."""
    if not copies:
        return
    # all texts before the first file: one that cannot be changed leaves nothing half done
    changed = [(edit.file, content) for edit in edits if edit.changes and (content := edit.content) is not None]
    lacking = ", ".join(edits[0].not_in_file) if edits else ""
    if not changed:
        why = f"the file has no key for {lacking}" if lacking else "nothing changes"
        say(f"{copies[0]} is not written: {why}")
        return
    for (_, content), copy in zip(changed, copies, strict=False):
        write_output(copy, content, force=force, more=f", without {lacking}" if lacking else "")
    for copy in copies[len(changed) :]:
        say(f"{copy} is not written: no other file changes")
    for file, _ in changed[len(copies) :]:
        say(f"{file} changes, too: repeat the option to write a copy of it")


own_file_option = click.option(
    "--config",
    "configs",
    multiple=True,
    metavar="FILE",
    help="The configuration that the training was started with (transformers, TRL, axolotl, LLaMA-Factory, torchtitan,"
    " accelerate, DeepSpeed): suggestions then show the lines to change in this file. Repeatable.",
)


class OwnConfig:
    """The files of --config, and where to write copies; raises RecipeError or OutputError if either cannot be done."""

    def __init__(self, sources: Sequence[str], copies: Sequence[Path], *, force: bool) -> None:
        self._copies, self._force = copies, force
        self._own: OwnFiles | None = None
        if sources:
            from ligerprof.analyzers.suggestions.find import read_own_files

            self._own = read_own_files(sources)
        check_copies(copies, () if self._own is None else self._own.files, force=force)

    def in_files(self, report: "PeakReport") -> "PeakReport":
        """The report with the lines of the files in its suggestions."""
        if self._own is None:
            return report
        from ligerprof.analyzers.suggestions.find import in_own_files

        return replace(report, suggestions=in_own_files(report.suggestions, self._own))

    def write(self, report: "PeakReport | None") -> None:
        """Write copies of the files with the first suggestion that they have keys for."""
        if self._own is None or not self._copies:
            return
        from ligerprof.analyzers.suggestions.find import first_edits

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


def recipe_and_files(recipe: TrainingRecipe) -> tuple[TrainingRecipe, OwnFiles]:
    """The running command's recipe and its --config files; the kernels are those that the files switch on."""
    report, (sources, given) = config_report(), config_sources()
    files, chosen = () if report is None else report.files, was_given("provider")
    if not recipe.kernels and not chosen and switch_liger(files):
        recipe = replace(recipe, provider="liger")
    return recipe, OwnFiles(sources=sources, given=given, files=files, recipe=recipe, switches_kernels=chosen)


def sharding_of(frameworks: Collection[str], engine: Engine | None) -> "Sharding":
    """How the frameworks of the files shard: torchtitan by FSDP2 alone; it and accelerate have groups of their own."""
    from ligerprof.analyzers.search.changes import Sharding

    if TORCHTITAN in frameworks:
        return Sharding(engine=engine or Engine.FSDP2, wrap=Wrap.ACCELERATE, reduce_dtype=ReduceDtype.FLOAT32)
    first = engine or Engine.DEEPSPEED
    if not frameworks or OWN in frameworks:
        return Sharding(engine=first)
    return Sharding(engine=first, wrap=Wrap.ACCELERATE, reduce_dtype=ReduceDtype.BFLOAT16)


def changes_of(own: OwnFiles) -> "Mapping[str, Sequence[Change]]":
    """The changes of `fit`, which keep the sequence, as the files can say them."""
    from ligerprof.analyzers.search.changes import NEAREST, make_ladder, same_data, settled

    ladder = same_data(make_ladder(sharding_of({framework for _, framework in own.files}, None)))
    changes = {"ladder": ladder, "nearest": NEAREST}
    return {name: settled(each, own.settle) for name, each in changes.items()} if own.files else changes
