"""`ligerprof study`: run the grids that a study file describes, resumable, and write the study's report."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ligerprof.cli.command import DocumentedCommand
from ligerprof.cli.common_options import (
    dry_run_option,
    folder_option,
    force_option,
    json_option,
    size_option,
    timeout_option,
    word_option,
)
from ligerprof.cli.output import print_json, say, say_written
from ligerprof.cli.sweep import print_plan, print_result, watching
from ligerprof.errors import RecipeError, UnsupportedError
from ligerprof.recipe.categories import Device, Engine
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Backend
from ligerprof.serialization import document
from ligerprof.text import short_repr
from ligerprof.words import did_you_mean

if TYPE_CHECKING:
    from benchmarks.study.grids import Study, StudyPart
    from ligerprof.runs.sweep.cells import SweepFolder
    from ligerprof.runs.sweep.runner import SweepPlan


@click.command(cls=DocumentedCommand, name="study", short_help="Run the grids of a study file and report them.")
@click.argument("file", required=False, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@folder_option(
    "The study's folder; finished cells in it are not run again. Default: runs/study, or runs/ and FILE's name."
)
@size_option(
    "--memory-limit", "memory_limit_bytes", "Limit on reserved bytes of the parts that have one, instead of FILE's."
)
@click.option("--only", metavar="NAMES", help="Parts, joined by commas. Default: all.")
@click.option("--provider", metavar="NAMES", help="Whose kernels, joined by commas. Default: all of FILE's.")
@word_option("--device", Device, "Where cells run.", Device.AUTO)
@timeout_option
@click.option(
    "--stop-at-oom/--no-stop-at-oom", default=True, show_default=True, help="Skip sizes above one out of memory."
)
@dry_run_option
@click.option("--report", is_flag=True, help="Write the report from the finished cells, and run nothing.")
@click.option(
    "--results",
    type=click.Path(path_type=Path, exists=True),
    multiple=True,
    help="Results of earlier runs to include in the report; may be repeated.",
)
@force_option
@json_option
def command(file: Path | None, output: Path | None, as_json: bool, **how: Any) -> None:
    """Run the grids of a study file and report them.

    FILE is TOML; docs/study.md describes it. The default is the study of 2024: Llama-3.2-1B under ZeRO-3 with
    everything offloaded and a limit of 23.5 GiB. It varies batch, sequence and kernel set, compares ligerprof's
    kernels with liger-kernel's, and measures each kernel alone, the loss of 2024, and the Liger paper's
    Llama-3-8B. A study that was stopped continues when it is started again.
    """
    from benchmarks.study.grids import load_study
    from ligerprof.runs.sweep.cells import SweepFolder
    from ligerprof.runs.sweep.runner import SweepSettings, run_sweep

    study = load_study(file)
    folder = SweepFolder(path=output or Path("runs") / (file.stem if file else "study"))
    words = shlex.join(["ligerprof", "study", *([str(file)] if file else [])])
    if how["report"]:
        written = _write_report(study, folder, how["results"], command=words, force=how["force"])
        if as_json:
            print_json(document("study-report", {"report": str(written)}))
        return
    plan = _plan(study, how)
    if how["dry_run"]:
        print_plan(plan, folder, as_json=as_json)
        return
    settings = SweepSettings(timeout_seconds=how["timeout"], stop_at_oom=how["stop_at_oom"], again=how["force"])
    with watching(plan) as watcher:
        result = run_sweep(plan, folder, settings, watcher)
    # before print_result raises for failed cells, so that the finished ones are reported
    _write_report(study, folder, how["results"], command=words, force=True)
    print_result(result, as_json=as_json)


def _write_report(
    study: "Study", folder: "SweepFolder", earlier: tuple[Path, ...], *, command: str, force: bool
) -> Path:
    """Write the report of the folder's cells and those of earlier runs."""
    from benchmarks.study.report import write_report
    from ligerprof.runs.sweep.cells import RESULTS_NAME

    own = [folder.path] if (folder.path / RESULTS_NAME).exists() else []
    # a cell of the folder replaces the same cell of an earlier run
    written = write_report(study, [*earlier, *own], folder.path, command=command, force=force)
    say_written(written)
    return written


def _plan(study: "Study", how: dict[str, Any]) -> "SweepPlan":
    """The cells of the parts that can run on this machine; in a dry run with `--device auto`, of all parts."""
    from ligerprof.runs.step import choose_backend
    from ligerprof.runs.sweep.runner import make_plan

    chosen = _choose(how["only"], [part.name for part in study.parts], "part")
    parts = [part for part in study.parts if part.name in chosen]
    providers = _choose(how["provider"], study.providers, "provider")
    device: Device = how["device"]
    # a dry run lists the cells of a GPU even if there is none
    lists_all = how["dry_run"] and device is Device.AUTO
    if not lists_all and choose_backend(TrainingRecipe(device=device)) is Backend.SIMULATED:
        device = Device.SIMULATED
        parts = _simulated_parts(parts)
    else:
        device = Device.CUDA
    grids = [
        study.grid(part, device=device, memory_limit_bytes=how["memory_limit_bytes"], providers=providers)
        for part in parts
    ]
    searches = tuple((part.find_limit, grid) for part, grid in zip(parts, grids, strict=True) if part.find_limit)
    return make_plan(tuple(grids), searches=searches)


def _choose(names: str | None, known: Sequence[str], what: str) -> Sequence[str]:
    """The names in a comma-separated option; all known ones if it was not given."""
    chosen = names.split(",") if names else known
    for name in chosen:
        if name not in known:
            meant = did_you_mean(name, known)
            raise RecipeError(f"the study has no {what} {short_repr(name)}.{meant} Known: {', '.join(known)}.")
    return chosen


def _simulated_parts(parts: "list[StudyPart]") -> "list[StudyPart]":
    """Parts that the simulator covers; reports the others, and raises UnsupportedError if it covers none."""
    zero = [part for part in parts if Engine.DEEPSPEED in part.options.get("engine", ())]
    left_out = ", ".join(part.name for part in zero)
    why = "studies do not simulate DeepSpeed; `ligerprof study --dry-run` shows the estimates"
    if len(zero) == len(parts):
        raise UnsupportedError(f"study: {left_out}: a CUDA device is needed, as {why}.")
    if zero:
        say(f"left out without a GPU: {left_out} ({why})")
    return [part for part in parts if part not in zero]
