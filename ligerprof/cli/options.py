"""The options of a recipe as click options, generated from the recipe's fields."""

import functools
from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem

from ligerprof.cli.common_options import Command
from ligerprof.errors import RecipeError
from ligerprof.recipe.options import Option
from ligerprof.recipe.training import RECIPE_OPTIONS, TrainingRecipe


class RecipeCommand(click.Command):
    """A command whose help lists its own options first, then those of a recipe by group."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section per group."""
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                declared = RECIPE_OPTIONS.get((parameter.name or "").removeprefix("no_"))
                sections.setdefault(str(declared.group) if declared else "Options", []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


class OptionType(click.ParamType):  # type: ignore[type-arg]
    """Reads a value as the recipe's option reads it."""

    def __init__(self, declared: Option) -> None:
        self._declared = declared
        self.name = declared.name

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str | None:  # noqa: ARG002 - click's signature
        """The words, or the declared placeholder."""
        return self._declared.placeholder

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse text; a wrong value is a usage error."""
        try:
            return self._declared.parse(value) if isinstance(value, str) else value
        except RecipeError as error:
            self.fail(str(error), param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002 - click's signature
        """The words that begin so."""
        return [CompletionItem(str(word)) for word in self._declared.choices if word.startswith(incomplete)]


def recipe_options(function: Command) -> Command:
    """Add every option of a recipe; the command gets one argument `recipe: TrainingRecipe`."""

    @functools.wraps(function)
    def with_recipe(**arguments: Any) -> Any:
        values = {name: arguments.pop(name) for name in RECIPE_OPTIONS}
        given = {name: value for name, value in values.items() if value is not None}
        return function(recipe=TrainingRecipe(**given), **arguments)

    decorated: Any = with_recipe
    for declared in reversed(tuple(RECIPE_OPTIONS.values())):
        decorated = _single(declared)(decorated)
    return decorated  # type: ignore[no-any-return]


def _single(declared: Option) -> Callable[[Any], Any]:
    """The option with one value."""
    if declared.kind is bool:
        flags = declared.flag if declared.off_flag is None else f"{declared.flag}/{declared.off_flag}"
        return click.option(
            flags, declared.name, is_flag=True, default=declared.default, show_default=True, help=declared.help
        )
    default = None if declared.default is None or declared.default_text else str(declared.default)
    return click.option(
        declared.flag,
        declared.name,
        type=OptionType(declared),
        default=default,
        show_default=declared.default_text or default is not None,
        help=declared.help,
    )
