"""Suggestions as changed lines of the configuration file that a training was started with."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from ligerprof.analyzers.suggestions.suggestion import Suggestion
from ligerprof.analyzers.suggestions.table import ROWS
from ligerprof.errors import LigerprofError, RecipeError
from ligerprof.recipe.configs.edits import can_edit, edit_file
from ligerprof.recipe.configs.load import load_recipe
from ligerprof.recipe.training import TrainingRecipe


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnFile:
    """A configuration file, and the recipe that it describes together with those next to it.

    Attributes:
        shards: whether this file decides how the model is sharded, rather than one of accelerate.
    """

    file: str
    framework: str
    recipe: TrainingRecipe
    shards: bool

    def lines_for(self, suggestion: Suggestion) -> tuple[str, ...]:
        """The lines to change in the file; none if it has no keys for the suggestion."""
        change = next((row.recipe for row in ROWS if row.name == suggestion.name), None)
        try:
            changed = None if change is None else change(self.recipe)
            if changed is None:
                return ()
            edit = edit_file(self.file, self.framework, self.recipe, changed, shards=self.shards)
        except LigerprofError:
            # the program differs from what the file says, or the file cannot be edited by lines
            return ()
        return () if edit.not_in_file or not edit.changes else (f"In {self.file}:", *edit.lines)


def read_own_file(sources: Sequence[str]) -> OwnFile:
    """Read the files that a training was started with, as `load_recipe` takes them; the first that can be edited is it.

    Raises:
        RecipeError: a file cannot be read, or none can be edited.
        UnsupportedError: a file asks for something that recipes cannot express.
    """
    recipe, report = load_recipe(sources, {})
    found = next((each for each in report.files if can_edit(*each)), None)
    if found is None:
        raise RecipeError(
            "--config: changed lines can be shown for files of transformers, TRL, axolotl, LLaMA-Factory and DeepSpeed."
            " Give one of these."
        )
    file, framework = found
    shards = "accelerate" not in {framework for _, framework in report.files}
    return OwnFile(file=file, framework=framework, recipe=recipe, shards=shards)


def in_own_file(suggestions: Sequence[Suggestion], own: OwnFile | None) -> tuple[Suggestion, ...]:
    """Suggestions with the lines to change in the file; those that it has no keys for stay as they are."""
    if own is None:
        return tuple(suggestions)
    lines = {suggestion.name: own.lines_for(suggestion) for suggestion in suggestions}
    return tuple(
        dataclasses.replace(suggestion, how=lines[suggestion.name] or suggestion.how) for suggestion in suggestions
    )
