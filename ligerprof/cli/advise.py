"""`ligerprof advise`: the cheapest changes that bring a recipe below a limit, each with its saving and cost."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ligerprof.cli import command_search
from ligerprof.cli.common_options import force_option, json_option, simulate_option, word_option
from ligerprof.cli.options import RecipeCommand, recipe_options
from ligerprof.cli.output import config_report, config_sources, show, stages
from ligerprof.cli.own_file import changed_copy_option, check_copies, recipe_and_files, sharding_of, write_copies
from ligerprof.errors import DoesNotFitError, LigerprofError, MissingDependencyError, UnsupportedError
from ligerprof.recipe.categories import Engine
from ligerprof.recipe.configs.edits import FileEdit, edits_json
from ligerprof.recipe.conflicts import require_packages, require_supported
from ligerprof.recipe.flags import command_line
from ligerprof.recipe.training import RECIPE_OPTIONS, TrainingRecipe
from ligerprof.units import format_bytes

if TYPE_CHECKING:
    from ligerprof.analyzers.search.changes import Advice


@click.command(cls=RecipeCommand, name="advise", context_settings={"allow_interspersed_args": False})
@recipe_options
@simulate_option
@command_search.command_options
@word_option(
    "--sharding",
    (Engine.DEEPSPEED, Engine.FSDP2),
    "What shards over several GPUs. Default: fsdp2 with a --config file of torchtitan, else deepspeed.",
)
@click.option("--all", "show_all", is_flag=True, help="List the changes that do not apply, too.")
@changed_copy_option("-o", "--output", what="the plan's changes")
@force_option
@json_option
def command(  # noqa: PLR0913 - one argument per option
    recipe: TrainingRecipe,
    *,
    simulate: bool,
    sharding: Engine | None,
    show_all: bool,
    copies: tuple[Path, ...],
    words: tuple[str, ...],
    force: bool,
    as_json: bool,
    **search: Any,
) -> None:
    """Suggest changes so that a recipe fits --memory-limit, or the memory of --gpu less the CUDA context.

    Tries a ladder of changes, the cheapest first, until the recipe fits. Prints the plan with its cost, with
    --config the changed lines of that file, and the command to run next; then what else would help. The exit code
    is 3 if the whole ladder does not suffice.

    With a COMMAND (trl sft ..., python train.py ...), finds the cheapest changes of its arguments or configuration
    file with which it fits, by running it on simulated GPUs. Nothing that it writes stays.
    """
    if words:
        command_search.refuse_with_command("simulate", "sharding")
        options = command_search.CommandOptions(
            recipe=recipe, words=words, search=search, copies=copies, force=force, as_json=as_json
        )
        command_search.advise_command(options, show_all=show_all)
        return
    command_search.require_command(search)
    from ligerprof.library import advise
    from ligerprof.reports.search import render_advice

    report = config_report()
    files = () if report is None else report.files
    check_copies(copies, files, force=force)
    recipe, own = recipe_and_files(recipe)
    with stages() as progress:
        advice = advise(
            recipe,
            simulate=simulate,
            progress=progress,
            tried=progress.attempt,
            sharding=sharding_of({framework for _, framework in files}, sharding),
            settle=own.settle if files else None,
        )
    runnable, reason = _runnable(advice)
    main_memory = _main_memory_note(advice) if recipe.host_memory_bytes is None else ""
    remarks = [remark for remark in (reason, main_memory) if remark]
    edits: tuple[FileEdit, ...] = ()
    try:
        edits = own.write(advice.plan).edits
    except LigerprofError as error:
        if copies:
            raise
        remarks.append(str(error))
    next_command = _next_command(runnable, advice, edits, copies)
    show(
        lambda: {**advice.to_json(), "command": next_command, "notes": [*advice.notes, *remarks], **edits_json(edits)},
        lambda: render_advice(advice, next_command, edits, remarks=remarks, show_all=show_all),
        as_json=as_json,
    )
    write_copies(edits, copies, force=force)
    if advice.plan_verdict.fits is False:
        raise DoesNotFitError(
            f"no change of the ladder makes it fit {format_bytes(advice.limit.size_bytes)}."
            " Choose another GPU, a shorter sequence or a smaller model."
        )
    if not advice.fits_host:
        needed = format_bytes(advice.host_bytes * advice.plan.gpus)
        raise DoesNotFitError(
            f"the plan needs {needed} of main memory, over --host-memory. Allow more, or offload less with --offload."
        )


def _runnable(advice: "Advice") -> tuple[str, str]:
    """The command to run next: `step` if it can run the plan, else `estimate`; and why not `step`, or nothing."""
    try:
        require_supported(advice.plan, command="step")
        if advice.plan.engine is not Engine.TORCH:
            require_packages(advice.plan, command="step")
    except (UnsupportedError, MissingDependencyError) as error:
        return "estimate", f"`ligerprof step` cannot run the plan here: {error}"
    return "step", ""


def _next_command(command: str, advice: "Advice", edits: Sequence[FileEdit], copies: Sequence[Path]) -> str:
    """The line to type: with the changed copies of --config files if they say the whole plan, else all its options."""
    changed = [edit.file for edit in edits if edit.changes and edit.text is not None]
    if not changed or len(copies) < len(changed) or any(edit.missing for edit in edits):
        return command_line(command, advice.plan)
    (sources, given), written = config_sources(), dict(zip(changed, copies, strict=False))
    words = ["ligerprof", command]
    for framework, equals, file in (source.rpartition("=") for source in sources):
        words += ["--config", f"{framework}{equals}{written.get(file, file)}"]
    for name in given:
        # what the plan changes is the files' from then on
        if (value := getattr(advice.plan, name)) == getattr(advice.recipe, name):
            words += RECIPE_OPTIONS[name].typed(value)
    return shlex.join(words)


def _main_memory_note(advice: "Advice") -> str:
    """A sentence if the plan needs more main memory than this machine has."""
    needed_bytes, available_bytes = advice.host_bytes * advice.plan.gpus, main_memory_bytes()
    if needed_bytes <= available_bytes:
        return ""
    needed, available = format_bytes(needed_bytes), format_bytes(available_bytes)
    return f"the plan needs {needed} of main memory for all its GPUs; this machine has {available}"


def main_memory_bytes() -> int:
    """The main memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
