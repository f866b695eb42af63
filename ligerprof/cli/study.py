"""`ligerprof study`: the study's whole grid by one command, resumable, ending in a report."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from ligerprof.cli.options import (
    dry_run_option,
    folder_option,
    force_option,
    json_option,
    size_option,
    timeout_option,
)
from ligerprof.cli.output import print_json, say
from ligerprof.cli.sweep import print_plan, print_result, watching
from ligerprof.errors import NotBuiltError
from ligerprof.recipe.training import DEVICES, TrainingRecipe
from ligerprof.runs.study.cells import PARTS, PROVIDERS, Part, adapt, select_parts, select_providers
from ligerprof.runs.sweep.cells import RESULTS_NAME
from ligerprof.runs.sweep.folder import SweepFolder
from ligerprof.runs.sweep.process import CellSettings
from ligerprof.runs.sweep.runner import RunnerSettings
from ligerprof.runs.sweep.session import SweepPlan, make_plan, run_sweep

_NAMES = ", ".join(part.name for part in PARTS)


@click.command(name="study", short_help="Run the 24 GB study's whole grid and report it.")
@folder_option("The study's folder; cells that are finished in it are not run again.", Path("runs/study"))
@size_option("--memory-limit", "memory_limit_bytes", "Limit on reserved bytes in the ZeRO parts. Default: 23.5GiB.")
@click.option("--only", metavar="NAMES", help=f"Parts, joined by commas: {_NAMES}. Default: all.")
@click.option("--provider", default=",".join(PROVIDERS), show_default=True, help="Whose kernels, joined by commas.")
@click.option("--device", type=click.Choice(DEVICES), default="auto", show_default=True, help="Where cells run.")
@timeout_option
@click.option(
    "--stop-at-oom/--no-stop-at-oom", default=True, show_default=True, help="Leave out sizes above one out of memory."
)
@dry_run_option
@click.option("--report", is_flag=True, help="Write the report from what is finished, and run nothing.")
@click.option(
    "--results",
    type=click.Path(path_type=Path, exists=True),
    multiple=True,
    help="Results of earlier runs that the report reads, too; may be given several times.",
)
@force_option
@json_option
def command(output: Path, dry_run: bool, report: bool, force: bool, as_json: bool, **how: Any) -> None:
    """Run the 24 GB study's whole grid and report it.

    Llama-3.2-1B under ZeRO-3 with everything offloaded and a limit of 23.5 GiB: batch and sequence against
    kernel sets, our kernels beside liger-kernel's, each kernel alone, the loss of 2024, and the Liger paper's
    Llama-3-8B. Started again, it goes on from where it was stopped.
    """
    folder = SweepFolder(path=output)
    if report:
        written = _write_report(folder, how["results"], force=force)
        if as_json:
            print_json({"schema": 1, "kind": "study-report", "report": str(written)})
        return
    plan = _plan(how, dry_run=dry_run)
    if dry_run:
        print_plan(plan, folder, as_json=as_json)
        return
    settings = RunnerSettings(
        cell=CellSettings(timeout_seconds=how["timeout"]), stop_at_oom=how["stop_at_oom"], again=force
    )
    with watching(plan) as watcher:
        result = run_sweep(plan, folder, settings, watcher)
    # before failed cells end the command: what ran is worth reading
    _write_report(folder, how["results"], force=True)
    print_result(result, as_json=as_json)


def _write_report(folder: SweepFolder, earlier: tuple[Path, ...], *, force: bool) -> Path:
    """Write the report of the folder's cells and those of earlier runs into the folder."""
    from ligerprof.reports.study import write_report

    own = [folder.path] if (folder.path / RESULTS_NAME).exists() else []
    # the folder's own cells count before those of the same recipe in an earlier run
    written = write_report([*earlier, *own], folder.path, force=force)
    say(f"wrote {written}")
    return written


def _plan(how: dict[str, Any], *, dry_run: bool) -> SweepPlan:
    """The cells of the parts that can run here; with `dry_run` of all parts."""
    parts = select_parts(how["only"].split(",") if how["only"] else ())
    device = "cuda" if dry_run and how["device"] == "auto" else _device(how["device"])
    providers = select_providers(how["provider"].split(","))
    adapted = [
        adapt(part, device=device, memory_limit_bytes=how["memory_limit_bytes"], providers=providers)
        for part in (parts if device == "cuda" else _simulated_parts(parts))
    ]
    searches = tuple((part.axis, part.grid) for part in adapted if part.axis is not None)
    return make_plan(tuple(part.grid for part in adapted), searches=searches)


def _device(word: str) -> str:
    from ligerprof.runs.step import choose_backend

    return "cuda" if choose_backend(TrainingRecipe(device=word)) == "measured" else "simulated"


def _simulated_parts(parts: tuple[Part, ...]) -> Iterator[Part]:
    """Parts that the simulator covers; says which it leaves out.

    Raises:
        NotBuiltError: none is left.
    """
    covered = [part for part in parts if "deepspeed" not in part.grid.options.get("engine", ())]
    left_out = ", ".join(part.name for part in parts if part not in covered)
    why = "the simulator does not cover ZeRO; `ligerprof study --dry-run` shows their closed form"
    if not covered:
        raise NotBuiltError(f"study: {left_out}: a CUDA device is needed, as {why}.")
    if left_out:
        say(f"left out without a GPU: {left_out} ({why})")
    yield from covered
