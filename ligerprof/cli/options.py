"""The options of a recipe as click options, generated from the recipe's fields: one value each, or several."""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from ligerprof.cli.command import HELP_ALL, DocumentedCommand
from ligerprof.cli.common_options import OF_OPTIONS, Command, or_usage_error
from ligerprof.cli.output import config_report, keep_config_report, say
from ligerprof.errors import RecipeError, UnsupportedError
from ligerprof.recipe.conflicts import require_positions
from ligerprof.recipe.options import Group, Option
from ligerprof.recipe.training import RECIPE_OPTIONS, TrainingRecipe

if TYPE_CHECKING:
    from ligerprof.recipe.configs.settings import Reading


class RecipeCommand(DocumentedCommand):
    """A command whose help lists its own options first, then those of a recipe by group."""

    def group_of(self, option: click.Option) -> str:
        """The heading of an option; --config belongs to the options of a recipe, which it sets."""
        declared = RECIPE_OPTIONS.get((option.name or "").removeprefix("no_"))
        if declared is not None:
            return str(declared.group)
        return str(Group.MODEL) if option.name == _CONFIG else super().group_of(option)

    def _sections(self, ctx: click.Context) -> Mapping[str, Sequence[click.Option]]:
        """The options by group, without those of a run where nothing runs."""
        sections = dict(super()._sections(ctx))
        if self.name not in _RUN:
            sections.pop(str(Group.RUN), None)
        return sections

    def is_brief(self, group: str) -> bool:
        """Of a recipe's options, --help describes those of the model and the batch."""
        return group in {str(each) for each in Group} - {str(Group.MODEL)}

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The parameters, with --help-all."""
        return [*super().get_params(ctx), _help_all]


def _show_whole_help(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[HELP_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


_help_all = click.Option(
    ["--help-all"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_whole_help,
    help="Show this message with every option and exit.",
)


class OptionType(click.ParamType):  # type: ignore[type-arg]
    """Reads a value as the recipe's option reads it."""

    def __init__(self, declared: Option) -> None:
        self._declared = declared
        self.name = declared.name

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str | None:  # noqa: ARG002 - click's signature
        """The words, or the declared placeholder."""
        return self._declared.placeholder

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ARG002 - click's signature
        """Parse text; an invalid value is a usage error."""
        return or_usage_error(self._declared.parse, value) if isinstance(value, str) else value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002 - click's signature
        """The words that start with `incomplete`; files if any value is allowed."""
        words = [str(word) for word in self._declared.choices]
        if not words:
            return [CompletionItem(incomplete, type="file")]
        return [CompletionItem(word) for word in words if word.startswith(incomplete)]


# the argument of --config
_CONFIG = "configs"
# commands whose answer depends on the GPU's memory
_JUDGES = ("fit", "advise")
# commands that answer for one recipe
_ANSWERS = ("estimate", "step", *_JUDGES)
# commands that the options of a run have an effect on
_RUN = ("step", "sweep", "study")
# the argument of a training command, in commands that have it
TRAINING_COMMAND = "training_command"
_CONFIG_HELP = (
    "Take the recipe from a configuration file: recipe.json or result.json of a run, TrainingArguments, TRL, axolotl,"
    " LLaMA-Factory, torchtitan, accelerate, DeepSpeed. Repeatable: later files win, and options on this line win over"
    " all. NAME=FILE names the framework; `env` reads the environment of a process that accelerate launched."
    " torchtitan's module:function imports the module and calls the function; nothing else is imported."
)
_config_option = click.option(
    "--config",
    _CONFIG,
    multiple=True,
    metavar="FILE",
    help=_CONFIG_HELP,
    shell_complete=lambda _ctx, _param, incomplete: [CompletionItem(incomplete, type="file")],
)


def _from_files(sources: tuple[str, ...], given: Mapping[str, Any], command: tuple[str, ...] = ()) -> dict[str, Any]:
    """Values of recipe options from --config files, a training command, and the options typed; reports to stderr."""
    from ligerprof.recipe.configs.resolve import load_options

    readings: list[Reading] = []
    if command:
        from ligerprof.recipe.commands.program import read_command

        readings = read_command(command, given)
    options, report = load_options(sources, given, command=readings)
    keep_config_report(report, sources, given)
    for line in report.lines():
        say(line)
    return options


def recipe_options(function: Command) -> Command:
    """Add every option of a recipe; the command gets one argument `recipe: TrainingRecipe`."""

    @functools.wraps(function)
    def with_recipe(**arguments: Any) -> Any:
        values, sources = {name: arguments.pop(name) for name in RECIPE_OPTIONS}, arguments.pop(_CONFIG)
        training: tuple[str, ...] = arguments.pop(TRAINING_COMMAND, ())
        given = {name: value for name, value in values.items() if value is not None}
        typed: set[str] = set()
        if sources or training:
            context = click.get_current_context()
            typed = {name for name in given if context.get_parameter_source(name) is not ParameterSource.DEFAULT}
            given = _from_files(sources, {name: given[name] for name in typed}, training)
        with _located(given.keys() - typed):
            recipe = TrainingRecipe(**given)
            if values["like"] is not None and recipe.like is None:
                say(f"--like {values['like']} is not used: the sizes of {recipe.spec.name} are known")
            # the default and files go beyond: a training may scale the positions
            if was_given("seq"):
                require_positions(recipe)
            _say_assumed(recipe, typed if sources or training else None, given)
            return function(recipe=recipe, **arguments)

    for declared in reversed(tuple(RECIPE_OPTIONS.values())):
        with_recipe = _single(declared)(with_recipe)
    return _config_option(with_recipe)  # type: ignore[return-value]


def _say_assumed(recipe: TrainingRecipe, typed: Collection[str] | None, given: Mapping[str, Any]) -> None:
    """Name the model that nobody chose, and the GPU where the command judges by it; JSON has both.

    `typed` are the options typed, where files set others; None without files.
    """

    def chosen(name: str) -> bool:
        return was_given(name) if typed is None else name in given

    context = click.get_current_context()
    if context.params.get("as_json") or context.command.name not in _ANSWERS:
        return
    # a command has a model of its own
    if not chosen("model") and not context.params.get("words"):
        say(f"assumed: --model {recipe.spec.name}, since none is given")
    if context.command.name in _JUDGES and not chosen("gpu") and not chosen("memory_limit_bytes"):
        say(f"assumed: --gpu {recipe.gpu}, since none is given")


@contextmanager
def _located(names: Collection[str]) -> Iterator[None]:
    """Add to errors about options which files and keys these come from; `names` are those that files set."""
    try:
        yield
    except (RecipeError, UnsupportedError) as error:
        report = config_report()
        message = str(error) if report is None else report.located(str(error), names)
        if message == str(error):
            raise
        raise type(error)(message) from error


def was_given(name: str) -> bool:
    """Whether an option of the running command was typed."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def _single(declared: Option) -> Callable[[Any], Any]:
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
        shell_complete=OF_OPTIONS.get(declared.name),
    )


def grid_options(function: Command) -> Command:
    """Add every option of a recipe, each with any number of values; the command gets one argument `grid: Grid`."""

    @functools.wraps(function)
    def with_grid(**arguments: Any) -> Any:
        from ligerprof.runs.sweep.cells import Grid

        options = {name: arguments.pop(name) for name in RECIPE_OPTIONS}
        for name, declared in RECIPE_OPTIONS.items():
            if declared.off_flag and arguments.pop(f"no_{name}"):
                options[name] = (False,)
        given = {name: values for name, values in options.items() if values}
        if sources := arguments.pop(_CONFIG):
            if len(given.get("model", ())) > 1:
                raise RecipeError("--config describes the training of one model. Choose one with --model.")
            fixed = _from_files(sources, {name: values[0] for name, values in given.items()})
            given = {**{name: (value,) for name, value in fixed.items()}, **given}
        return function(grid=Grid(options=given), **arguments)

    for declared in reversed(tuple(RECIPE_OPTIONS.values())):
        for option in _several(declared):
            with_grid = option(with_grid)
    return _config_option(with_grid)  # type: ignore[return-value]


def _several(declared: Option) -> Iterator[Callable[[Any], Any]]:
    """The click option for several values, after the flag that switches it off if it has one."""
    if declared.off_flag:
        yield click.option(declared.off_flag, f"no_{declared.name}", is_flag=True, help=f"{declared.flag} off.")
    yield click.option(
        declared.flag,
        declared.name,
        multiple=True,
        is_flag=False,
        # a switch without a value is on, as in other commands
        flag_value="on" if declared.kind is bool else None,
        callback=functools.partial(_read_values, declared),
        metavar=f"{declared.placeholder or 'on|off'},…",
        help=declared.help,
        shell_complete=functools.partial(_complete_last, declared),
    )


def _complete_last(
    declared: Option, ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    if (names := OF_OPTIONS.get(declared.name)) is not None:
        return names(ctx, param, incomplete)
    before, comma, last = incomplete.rpartition(",")
    found = OptionType(declared).shell_complete(ctx, param, last)
    return [CompletionItem(before + comma + item.value, type=item.type) for item in found]


def _read_values(
    declared: Option, _ctx: click.Context, _param: click.Parameter, texts: tuple[str, ...]
) -> tuple[Any, ...]:
    """The distinct values in the texts; `none` is None for an option that may be None."""
    words = [word.strip() for text in texts for word in ([text] if declared.has_commas else text.split(","))]
    if not all(words):
        raise click.BadParameter("an empty value between commas")
    return tuple(
        dict.fromkeys(
            None if word == "none" and declared.default is None else or_usage_error(declared.parse, word)
            for word in words
        )
    )
