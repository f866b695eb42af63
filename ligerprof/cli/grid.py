"""The recipe's options with several values each: the same flags and checks, values joined by commas."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import click

from ligerprof.cli.common_options import Command, or_usage_error
from ligerprof.recipe.options import Option
from ligerprof.recipe.training import RECIPE_OPTIONS
from ligerprof.runs.sweep.grid import Grid

_OFF = "none"


def grid_options(function: Command) -> Command:
    """Add every option of a recipe, each with any number of values; the command gets one argument `grid: Grid`."""

    @functools.wraps(function)
    def with_grid(**arguments: Any) -> Any:
        options = {name: arguments.pop(name) for name in RECIPE_OPTIONS}
        for name, declared in RECIPE_OPTIONS.items():
            if declared.off_flag and arguments.pop(f"no_{name}"):
                options[name] = (False,)
        return function(grid=Grid(options={name: values for name, values in options.items() if values}), **arguments)

    decorated: Any = with_grid
    for declared in reversed(tuple(RECIPE_OPTIONS.values())):
        for option in _several(declared):
            decorated = option(decorated)
    return decorated  # type: ignore[no-any-return]


def _several(declared: Option) -> Iterator[Callable[[Any], Any]]:
    """The option with several values, after the flag that switches it off if it has one."""
    is_switch = declared.kind is bool
    if declared.off_flag:
        yield click.option(declared.off_flag, f"no_{declared.name}", is_flag=True, help=f"{declared.flag} off.")
    yield click.option(
        declared.flag,
        declared.name,
        multiple=True,
        is_flag=False,
        # a switch without a value is on, as in other commands
        flag_value="on" if is_switch else None,
        callback=functools.partial(_read_values, declared),
        metavar=f"{declared.placeholder or 'on|off'},…",
        help=declared.help,
    )


def _read_values(
    declared: Option, _ctx: click.Context, _param: click.Parameter, texts: tuple[str, ...]
) -> tuple[Any, ...]:
    """The distinct values in the texts, each parsed as the single option parses it."""
    words = [word.strip() for text in texts for word in ([text] if declared.has_commas else text.split(","))]
    if not all(words):
        raise click.BadParameter("an empty value between commas")
    values = [
        None if word == _OFF and declared.default is None else or_usage_error(declared.parse, word) for word in words
    ]
    return tuple(dict.fromkeys(values))
