"""`fit -- COMMAND` and `advise -- COMMAND`: options of a search with simulated runs of a training command."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ligerprof.cli.common_options import Command
from ligerprof.cli.interrupts import EXIT_CODE, take_longer
from ligerprof.cli.options import was_given
from ligerprof.cli.output import Stages, print_text, show, stages, write_output
from ligerprof.cli.own_file import changed_copy_option, require_different
from ligerprof.errors import DoesNotFitError, LigerprofError, OutputError
from ligerprof.files import require_absent
from ligerprof.recipe.categories import Engine
from ligerprof.recipe.training import RECIPE_OPTIONS, TrainingRecipe
from ligerprof.recipe.usable_memory import find_limit
from ligerprof.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ligerprof.runs.command_search.fastest import FastestCommand, FittingSplits
    from ligerprof.runs.command_search.session import Begin, CheapestFit, CommandProblem, LargestFit, Tell
    from ligerprof.runs.command_search.trials import Trial

    Found = LargestFit | CheapestFit | FastestCommand | FittingSplits

FoundT = TypeVar("FoundT", bound="Found")
# options of a recipe that say where a command runs
_OF_MACHINE = ("gpu", "memory_limit", "memory_limit_bytes", "routing")
_STEPS = 2
# time to end the trials, and to print what is known
_INTERRUPTED_SECONDS = 5


def command_options(function: Command) -> Command:
    """Add the argument COMMAND and the options of a search with it, passed as `words`, `vary`, `steps` and so on."""
    decorators = (
        click.option(
            "--vary",
            multiple=True,
            metavar="KEY=V1,V2,…",
            callback=_read_vary,
            help="Of a COMMAND: an argument or key to vary, and its values, from the one that needs least on.",
        ),
        click.option(
            "--steps",
            type=click.IntRange(min=1),
            default=_STEPS,
            show_default=True,
            help="Of a COMMAND: the optimizer steps of each simulated run.",
        ),
        click.option("--eager", is_flag=True, help="Of a COMMAND: simulate functions of torch.compile without it."),
        click.option("--flash-attn", is_flag=True, help="Of a COMMAND: simulate flash-attn where it is not installed."),
        click.option(
            "--at-once", type=click.IntRange(min=1), help="Of a COMMAND: simulated runs at a time. Default: by cores."
        ),
        click.argument("words", metavar="[-- COMMAND]", nargs=-1, type=click.UNPROCESSED),
    )
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


output_option = changed_copy_option("-o", "--output", what="the answer")


def _read_vary(_ctx: click.Context, _param: click.Parameter, texts: Sequence[str]) -> list[tuple[str, tuple[Any, ...]]]:
    if not texts:
        return []
    from ligerprof.runs.command_search.session import read_vary

    try:
        return [read_vary(text) for text in texts]
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def require_command(given: dict[str, object]) -> None:
    """Raise a usage error if an option of a COMMAND was typed without one."""
    for name in given:
        if was_given(name):
            raise click.UsageError(f"--{name.replace('_', '-')} needs a command after --.")


def refuse_with_command(*names: str) -> None:
    """Raise a usage error if an option of a recipe, or one of these, was typed next to a command, which has its own."""
    for parameter in click.get_current_context().command.params:
        name = str(parameter.name)
        is_recipes = name in RECIPE_OPTIONS and name not in _OF_MACHINE
        if (is_recipes or name in (*names, "configs")) and was_given(name):
            raise click.UsageError(f"{parameter.opts[0]} does not go with a command after --. Leave it out.")


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandOptions:
    """What is typed next to a training command: `search` are the values of `command_options`."""

    recipe: TrainingRecipe
    words: Sequence[str]
    search: Mapping[str, Any]
    copies: Sequence[Path]
    force: bool
    as_json: bool


def _problem(options: CommandOptions, *, times: bool = False) -> "CommandProblem":
    from ligerprof.recipe.commands.changes import TrainingCommand
    from ligerprof.runs.command_search.session import CommandProblem
    from ligerprof.runs.command_search.trials import Machine, trials_at_once
    from ligerprof.runs.recording.settings import SimulatedGpu, Steps

    recipe, search, copies = options.recipe, options.search, options.copies
    take_longer(_INTERRUPTED_SECONDS)
    command = TrainingCommand.read(options.words)
    if copies:
        require_absent(copies, force=options.force)
        if len(copies) > len(command.files):
            raise OutputError(
                f"{copies[-1]}: the command names {len(command.files)} configuration files. Leave -o out."
            )
        require_different(copies)
    world = search.get("world")
    gpus = world or (command.launch and command.launch.processes) or 1
    at_once = search["at_once"] or max(trials_at_once() // (2 if gpus > 1 else 1), 1)
    given = {name: search[name] for name in ("eager", "flash_attn")}
    gpu = SimulatedGpu(gpu=recipe.gpu_spec.name, routing=recipe.routing, times=times, **given)
    return CommandProblem(
        command=command,
        # with several GPUs, NCCL's buffers are subtracted
        limit=find_limit(replace(recipe, engine=Engine.DDP, gpus=gpus) if gpus > 1 else recipe),
        machine=Machine(folder=Path(), gpu=gpu, steps=Steps(last=search["steps"]), at_once=at_once, world=world),
        copies=dict(zip(command.files, copies, strict=False)) if copies else None,
    )


def fit_command(options: CommandOptions) -> None:
    """Find the largest micro-batch, or value of --vary, with which a command fits."""
    from ligerprof.recipe.commands.changes import find_batches
    from ligerprof.reports.command_search import render_largest
    from ligerprof.runs.command_search.session import largest_batch, largest_value

    vary = options.search["vary"]
    if options.search["world"]:
        _fit_splits(options)
        return
    if len(vary) > 1:
        raise click.UsageError("fit varies one argument. Give --vary once.")
    problem = _problem(options)
    batches = None if vary else find_batches(problem.command)

    def find(tell: "Tell", begin: "Begin") -> "LargestFit":
        if batches is None:
            key, values = vary[0]
            return largest_value(problem, key, values, tell, begin)
        return largest_batch(problem, batches, tell, begin)

    _answer(
        options,
        problem,
        find,
        render_largest,
        lambda found: f"no {found.key} fits {_size(problem)}. Run `ligerprof advise` with it.",
    )


def _fit_splits(options: CommandOptions) -> None:
    from ligerprof.recipe.commands.splits import find_splits
    from ligerprof.reports.command_search import render_splits
    from ligerprof.runs.command_search.fastest import fitting_splits
    from ligerprof.runs.command_search.trials import Outcome

    problem, world = _problem(options), options.search["world"]
    splits = find_splits(problem.command, world, options.search["vary"])

    def nothing(found: "FittingSplits") -> str:
        if all(trial.outcome is Outcome.FAILED for _, trial in found.trials):
            raise LigerprofError(f"every split of {world} GPUs fails. Run the command with ligerprof run first.")
        return f"no split of {world} GPUs fits {_size(problem)}."

    _answer(options, problem, lambda tell, begin: fitting_splits(problem, splits, tell, begin), render_splits, nothing)


def fastest_command(options: CommandOptions) -> None:
    """Find the fastest of a command's alternatives that fit."""
    from ligerprof.recipe.commands.changes import find_batches
    from ligerprof.reports.command_search import render_fastest_command
    from ligerprof.runs.command_search.fastest import fastest_command as find

    for name in ("vary", "world"):
        if options.search[name]:
            raise click.UsageError(f"--fastest varies what trains the same. Leave --{name} out.")
    problem = _problem(options, times=True)
    batches = find_batches(problem.command)
    _answer(
        options,
        problem,
        lambda tell, begin: find(problem, batches, tell, begin),
        render_fastest_command,
        lambda _found: f"nothing fits {_size(problem)}. Run `ligerprof advise` with it.",
    )


def advise_command(options: CommandOptions, *, show_all: bool) -> None:
    """Find the cheapest changes with which a command fits."""
    from ligerprof.recipe.commands.changes import find_batches
    from ligerprof.reports.command_search import render_cheapest
    from ligerprof.runs.command_search.session import cheapest_changes, levers_of

    problem = _problem(options)
    levers = levers_of(problem.command, options.search["vary"])
    if not any(lever.change.keys for lever in levers):
        # says which keys were looked for
        find_batches(problem.command)
    _answer(
        options,
        problem,
        lambda tell, begin: cheapest_changes(problem, levers, tell, begin),
        lambda found: render_cheapest(found, show_all=show_all),
        lambda _found: f"no change makes it fit {_size(problem)}. Name others with --vary, or another GPU.",
    )


def _size(problem: "CommandProblem") -> str:
    return format_bytes(problem.limit.size_bytes)


def _answer(
    options: CommandOptions,
    problem: "CommandProblem",
    find: "Callable[[Tell, Begin], FoundT]",
    render: "Callable[[FoundT], RenderableType]",
    nothing: "Callable[[FoundT], str]",
) -> None:
    """Search, write the files of -o, and print the result; `nothing` is the error where nothing fits."""
    from ligerprof.runs.command_search.trials import Outcome

    with stages() as progress:
        tell, begin = _teller(problem, progress, as_json=options.as_json)
        found = find(tell, begin)
        again = _write(problem, found, begin, force=options.force)
    show(found.to_json, lambda: render(found), as_json=options.as_json)
    if not found.is_whole:
        click.get_current_context().exit(EXIT_CODE)
    if found.trial is None:
        raise DoesNotFitError(nothing(found))
    if again is not None and again.outcome is not Outcome.RAN:
        raise LigerprofError(
            f"run once more as it is typed, the command ends otherwise: {again.outcome} {again.reason}."
        )


def _teller(
    problem: "CommandProblem", progress: Stages, *, as_json: bool
) -> "tuple[Callable[[str, Trial], None], Callable[[str], None]]":
    """Prints each trial when it has ended, the first one below the command and the limit."""
    from rich.text import Text

    from ligerprof.reports.command_search import trial_line
    from ligerprof.reports.search import heading

    if not as_json:
        with progress.aside():
            print_text(heading(f"{problem.command.name} on a simulated GPU", problem.limit))

    def tell(name: str, trial: "Trial") -> None:
        if as_json:
            return
        with progress.aside():
            print_text(Text(trial_line(name, trial)))

    return tell, lambda name: progress(f"simulating {name}")


def _write(problem: "CommandProblem", found: "Found", begin: "Begin", *, force: bool) -> "Trial | None":
    """Write the files of -o, and run the command with them; None without -o, or if nothing in a file changes."""
    from ligerprof.runs.command_search.session import run_again

    if problem.copies is None or found.trial is None or not found.is_whole:
        return None
    changed = problem.changed(found.change)
    if not changed.files:
        # the command fits as it is
        return None
    for path, text in changed.files.items():
        write_output(path, text, force=force)
    return run_again(problem, changed, begin)
