"""Suggestions as changed lines of the configuration files that a training was started with."""

import dataclasses
from collections.abc import Sequence

from ligerprof.analyzers.suggestions.rows import ROWS
from ligerprof.analyzers.suggestions.suggestion import Suggestion
from ligerprof.errors import LigerprofError, RecipeError
from ligerprof.recipe.configs.edits import EDITABLE, FileEdit, OwnFiles, can_edit, edit_files
from ligerprof.recipe.configs.resolve import load_recipe


def edits_for(suggestion: Suggestion, own: OwnFiles) -> tuple[FileEdit, ...]:
    """The files that the suggestion changes; none if they lack keys for it."""
    change = next((row.recipe for row in ROWS if row.name == suggestion.name), None)
    try:
        changed = None if change is None else change(own.recipe)
        edits = () if changed is None else edit_files(own.files, own.recipe, changed)
    except LigerprofError:
        # the program differs from what the files say
        return ()
    return tuple(edit for edit in edits if edit.changes and not edit.missing)


def lines_for(suggestion: Suggestion, own: OwnFiles) -> tuple[str, ...]:
    """The lines to change; none if the files have no keys for the suggestion."""
    return tuple(line for edit in edits_for(suggestion, own) for line in (f"In {edit.file}:", *edit.lines))


def read_own_files(sources: Sequence[str]) -> OwnFiles:
    """Read the files that a training was started with, as `load_recipe` takes them.

    Raises:
        RecipeError: a file cannot be read, or none can be edited.
        UnsupportedError: a file asks for something that recipes cannot express.
    """
    recipe, report = load_recipe(sources, {})
    if not any(can_edit(*each) for each in report.files):
        raise RecipeError(f"--config: changed lines can be shown for files of {EDITABLE}. Give one of these.")
    return OwnFiles(sources=sources, given={}, files=report.files, recipe=recipe)


def in_own_files(suggestions: Sequence[Suggestion], own: OwnFiles) -> tuple[Suggestion, ...]:
    """Suggestions with the lines to change in the files; those that these have no keys for stay as they are."""
    lines = {suggestion.name: lines_for(suggestion, own) for suggestion in suggestions}
    return tuple(
        dataclasses.replace(suggestion, how=lines[suggestion.name] or suggestion.how) for suggestion in suggestions
    )


def first_edits(suggestions: Sequence[Suggestion], own: OwnFiles) -> tuple[Suggestion, tuple[FileEdit, ...]] | None:
    """The first suggestion that the files have keys for, with the changed files; None without one."""
    found = ((suggestion, edits_for(suggestion, own)) for suggestion in suggestions)
    return next(((suggestion, edits) for suggestion, edits in found if edits), None)
