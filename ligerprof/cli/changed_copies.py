"""The option that writes changed copies of --config files, and what it does."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from ligerprof.cli.output import say, say_written
from ligerprof.errors import OutputError
from ligerprof.files import require_absent, write_new_file
from ligerprof.recipe.configs.edits import FileEdit, require_editable

_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def changed_copy_option(*names: str, what: str) -> _Decorator:
    """The option `copies`: a file per --config file that changes, in their order."""
    return click.option(
        *names,
        "copies",
        multiple=True,
        metavar="FILE",
        type=click.Path(path_type=Path, dir_okay=False),
        help=f"Write the --config file with {what} here; other lines and comments stay. Repeat it if several change.",
    )


def check_copies(copies: Sequence[Path], files: Sequence[tuple[str, str]], *, force: bool) -> None:
    """Raise OutputError if copies were asked for and no file can be rewritten, or a copy exists or is named twice.

    Args:
        files: the --config files, each with its framework.
        force: whether existing files are replaced.
    """
    if copies:
        require_editable(files)
        require_absent(copies, force=force)
        if len(set(map(os.path.realpath, copies))) < len(copies):
            raise OutputError(f"{', '.join(map(str, copies))}: two copies under one name. Name a file for each.")


def write_copies(edits: Sequence[FileEdit], copies: Sequence[Path], *, force: bool) -> None:
    """Write the changed files, and say which changes they lack.

    Raises:
        RecipeError: lines cannot be replaced in one of the files; none is written.
        OutputError: a file cannot be written.
    """
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
        write_new_file(copy, content, force=force)
        say_written(copy, f", without {lacking}" if lacking else "")
    for copy in copies[len(changed) :]:
        say(f"{copy} is not written: no other file changes")
    for file, _ in changed[len(copies) :]:
        say(f"{file} changes, too: repeat the option to write a copy of it")
