"""The recipe's options with several values each: the same flags, the same checks, values joined by commas."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import click

from ligerprof.cli.options import Command, recipe_parameters
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.sweep.grid import Grid

_OFF = "none"
_MAY_BE_NONE = {item.name for item in dataclasses.fields(TrainingRecipe) if item.default is None}
_SWITCH_WORDS = {"on": True, "off": False}
# its own values hold commas; the option is given several times instead
_WHOLE = ("alloc_conf",)


def grid_options(function: Command) -> Command:
    """Add every option of a recipe, each with any number of values; the command gets one argument `grid: Grid`."""
    singles = recipe_parameters()

    @functools.wraps(function)
    def with_grid(**arguments: Any) -> Any:
        options = {str(single.name): arguments.pop(str(single.name)) for single in singles}
        for single in singles:
            if single.secondary_opts and arguments.pop(f"no_{single.name}"):
                options[str(single.name)] = (False,)
        return function(grid=Grid(options={name: values for name, values in options.items() if values}), **arguments)

    decorated: Any = with_grid
    for single in reversed(singles):
        for option in _several(single):
            decorated = option(decorated)
    return decorated  # type: ignore[no-any-return]


def _several(single: click.Option) -> Iterator[Callable[[Any], Any]]:
    """The option with several values; before it the flag that switches it off, where there is one."""
    if single.secondary_opts:
        yield click.option(*single.secondary_opts, f"no_{single.name}", is_flag=True, help=f"{single.opts[0]} off.")
    one = "on|off" if single.is_flag else single.make_metavar(click.Context(click.Command("sweep")))
    yield click.option(
        *single.opts,
        str(single.name),
        multiple=True,
        is_flag=False,
        # a switch may be given alone, as in other commands
        flag_value="on" if single.is_flag else None,
        callback=functools.partial(_read_values, single),
        metavar=f"{one},…",
        help=single.help,
    )


def _read_values(
    single: click.Option, ctx: click.Context, _param: click.Parameter, texts: tuple[str, ...]
) -> tuple[Any, ...]:
    """Every value in the texts, each once, read as the single option reads it."""
    words = [word.strip() for text in texts for word in ([text] if single.name in _WHOLE else text.split(","))]
    if not all(words):
        raise click.BadParameter("an empty value between commas")
    return tuple(dict.fromkeys(_read(single, word, ctx) for word in words))


def _read(single: click.Option, word: str, ctx: click.Context) -> Any:
    if single.is_flag:
        if word not in _SWITCH_WORDS:
            raise click.BadParameter(f"{word!r} is neither on nor off")
        return _SWITCH_WORDS[word]
    if word == _OFF and single.name in _MAY_BE_NONE:
        return None
    return single.process_value(ctx, word)
