"""`ligerprof run`: someone's own training, recorded without a change to it."""

import json
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from ligerprof.cli import common_options as common
from ligerprof.cli.command import DocumentedCommand
from ligerprof.cli.output import print_json, say
from ligerprof.cli.own_file import OwnConfig, changed_copy_option, own_file_option
from ligerprof.errors import DoesNotFitError, MissingDependencyError, RecipeError, UnsupportedError
from ligerprof.files import is_file, is_folder
from ligerprof.recipe.routing import canonical_routing
from ligerprof.runs.recording.settings import Steps

if TYPE_CHECKING:
    from ligerprof.runs.recording.launch import CommandEnd
    from ligerprof.runs.recording.settings import Settings, SimulatedGpu


@click.command(
    cls=DocumentedCommand,
    name="run",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "--steps",
    metavar="FIRST:LAST",
    help="The training steps to record, such as 2:4 or 3, counted from 1. Default: all, those around the peak whole.",
    callback=lambda _ctx, _param, text: Steps() if text is None else common.or_usage_error(Steps.parse, text),
)
@common.size_option("--disk", "disk_bytes", "Limit on files of a recording while the command runs. Default: 4GB.")
@click.option(
    "--device",
    type=common.WordChoice(("cuda", "simulated")),
    default="cuda",
    show_default=True,
    help="Run on this machine's GPU, or without one on a simulated GPU.",
)
@click.option("--gpu", metavar="NAME", help="The simulated GPU. Default: h200.")
@common.size_option("--memory-limit", "limit_bytes", "Limit on the simulated GPU's reserved memory.")
@click.option("--eager", is_flag=True, help="Simulate functions of torch.compile without it.")
@click.option("--flash-attn", is_flag=True, help="Simulate flash-attn where it is not installed.")
@click.option(
    "--routing",
    metavar="uniform|worst|FILE",
    callback=lambda _ctx, _param, text: None if text is None else common.or_usage_error(canonical_routing, text),
    help="How tokens choose experts in the simulation, as for `ligerprof step`. Default: uniform.",
)
@click.option("--world", type=click.IntRange(min=1), help="Number of simulated ranks. Default: what the launcher says.")
@click.option(
    "--ranks",
    metavar="LIST",
    default="",
    help="The ranks to simulate, such as 0,63. Default: the first, its pipeline, the last, and those they wait for.",
    callback=lambda _ctx, _param, text: common.or_usage_error(_ranks, text),
)
@own_file_option
@changed_copy_option("--fixed-config", what="the first suggestion")
@common.top_option
@common.folder_option("The folder of the recordings. Default: the next number under runs/.")
@common.force_option
@common.json_option
@click.argument(
    "command_line",
    metavar="-- COMMAND",
    nargs=-1,
    required=True,
    type=click.UNPROCESSED,
    callback=lambda _ctx, _param, words: _require_program(words),
)
@click.pass_context
def command(  # noqa: PLR0913 - one argument per option
    ctx: click.Context,
    *,
    steps: Steps,
    disk_bytes: int | None,
    device: str,
    gpu: str | None,
    limit_bytes: int | None,
    eager: bool,
    flash_attn: bool,
    routing: str | None,
    world: int | None,
    ranks: tuple[int, ...],
    configs: tuple[str, ...],
    copies: tuple[Path, ...],
    top: int,
    output: Path | None,
    force: bool,
    as_json: bool,
    command_line: tuple[str, ...],
) -> None:
    """Run a training command unchanged, and show what holds the memory at its peak.

    With --device simulated, the command runs without a GPU: operators compute sizes and no values,
    and weights are neither read nor written.

    COMMAND is what you would type: python train.py, python -m package, torchrun ..., accelerate
    launch ..., deepspeed ...; a Python file alone is run by this Python. Each process that uses a
    CUDA device is recorded, with the phase, step and module of every allocation. The command's
    output passes through; the report goes to stderr. The exit code is the command's, or 3 if it
    failed because memory ran out.
    """
    from ligerprof.reports.run import render_run
    from ligerprof.reports.terminal import console
    from ligerprof.runs.directory import RESULT, create_run_directory
    from ligerprof.runs.recording.collected import arrange, clear_recordings, collect
    from ligerprof.runs.recording.settings import DISK_BYTES, Mode, Settings

    simulated = None
    if device == "simulated":
        simulated = replace(_simulated_gpu(gpu, limit_bytes, routing), eager=eager, flash_attn=flash_attn)
    given = any(value is not None for value in (gpu, limit_bytes, routing, world)) or eager or flash_attn or ranks
    if simulated is None and given:
        raise click.UsageError(
            "--gpu, --memory-limit, --eager, --flash-attn, --routing, --world and --ranks need --device simulated."
        )
    own = _own_config(configs, copies, force=force)
    run = create_run_directory(output, force=force)
    clear_recordings(run.path)
    settings = Settings(
        mode=Mode.RUN,
        output=run.path,
        steps=steps,
        disk_bytes=DISK_BYTES if disk_bytes is None else disk_bytes,
        simulated=simulated,
    )
    # with --json, stdout is for the result alone
    try:
        with _ranked(command_line, world, ranks) as (started, variables):
            end = _run(started, variables, settings, stdout=2 if as_json else None)
    except MissingDependencyError:
        run.remove_if_empty()
        raise
    except KeyboardInterrupt:
        # before the command started, and after its end
        ctx.exit(128 + signal.SIGINT)
    notes: list[str] = []
    if end.interrupted:
        if end.runs:
            say(f"interrupted; the command is still ending, and writes its recordings to {run.path}")
        elif arrange(run.path, notes):
            say(f"interrupted; the recordings are in {run.path}, for `ligerprof explain`")
        else:
            say("; ".join(("interrupted", *notes)))
            run.remove_if_empty()
        ctx.exit(end.exit_code)
    report = collect(run.path, command_line, end.exit_code, own.in_files, is_simulated=simulated is not None)
    result = report.to_json()
    if report.ranks:
        run.write_text(RESULT, json.dumps(result, indent=2) + "\n")
    else:
        run.remove_if_empty()
    if as_json:
        print_json(result)
    else:
        console(sys.stderr).print(render_run(report, top=top))
    own.write(report.ranks[0].report if report.ranks else None)
    ctx.exit(DoesNotFitError.exit_code if report.ran_out else end.exit_code)


def _require_program(words: tuple[str, ...]) -> tuple[str, ...]:
    """The command's words; an option before it that `run` does not have is an error."""
    if words[:1] and words[0].startswith("-"):
        raise click.NoSuchOption(words[0])
    return words


def _run(
    started: Sequence[str], variables: Mapping[str, str], settings: "Settings", stdout: int | None
) -> "CommandEnd":
    """Run the command; a simulated one leaves nothing but the run directory."""
    from ligerprof.runs.recording.launch import environment_of, run_command
    from ligerprof.simulated_gpu.files import leaving_nothing

    is_real = settings.simulated is None
    with nullcontext() if is_real or settings.output is None else leaving_nothing(settings.output):
        return run_command(started, {**environment_of(settings), **variables}, stdout=stdout, outlives=is_real)


def _own_config(configs: tuple[str, ...], copies: tuple[Path, ...], *, force: bool) -> OwnConfig:
    """The --config files; files that exist and are not a recipe cost the changed lines, not the run."""
    try:
        return OwnConfig(configs, copies, force=force)
    except (RecipeError, UnsupportedError) as error:
        files = [Path(source.partition("=")[2] or source) for source in configs]
        if not all(is_file(path) or is_folder(path) for path in files):
            raise
        unwritten = "".join(f", and {copy} is not written" for copy in copies)
        say(f"no estimate and no changed lines are shown{unwritten}: {error}")
        return OwnConfig((), (), force=force)


def _simulated_gpu(gpu: str | None, limit_bytes: int | None, routing: str | None) -> "SimulatedGpu":
    from ligerprof.gpus import DEFAULT_GPU, find_gpu
    from ligerprof.runs.recording.settings import DEFAULT_ROUTING, SimulatedGpu

    name = common.or_usage_error(find_gpu, gpu or DEFAULT_GPU).name
    return SimulatedGpu(gpu=name, limit_bytes=limit_bytes, routing=routing or DEFAULT_ROUTING)


def _ranks(text: str) -> tuple[int, ...]:
    from ligerprof.simulated_gpu.ranks.world import parse_ranks

    return parse_ranks(text) if text else ()


@contextmanager
def _ranked(
    command_line: tuple[str, ...], world: int | None, ranks: tuple[int, ...]
) -> Iterator[tuple[list[str], dict[str, str]]]:
    """The command as it is started, and variables for its ranks, which have a folder for messages meanwhile."""
    from ligerprof.runs.recording.launch import ranked_command
    from ligerprof.simulated_gpu.ranks.world import World

    with TemporaryDirectory(prefix="ligerprof-ranks-", ignore_cleanup_errors=True) as folder:
        yield ranked_command(command_line, world), World(size=world, ranks=ranks, folder=Path(folder)).to_environment()
