"""`ligerprof bench`: time kernels of several providers in turns on one GPU."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ligerprof.cli import common_options as common
from ligerprof.cli.command import DocumentedCommand
from ligerprof.cli.output import say, say_written, show
from ligerprof.errors import RecipeError
from ligerprof.files import require_absent, write_new_file
from ligerprof.runs.bench.records import BENCH_KERNELS, Direction

if TYPE_CHECKING:
    from ligerprof.runs.bench.records import Finding

RECORDS, TABLE, FIGURE = "bench.jsonl", "bench.csv", "bench.svg"
_HELP = f"""Time kernels side by side and check them against fp64.

KERNEL is {", ".join(BENCH_KERNELS)}, or all. The providers are timed in turns, together with a floor: the fused loss's
three matrix products alone, or a copy of as many bytes as the operation must move. A provider that cannot run is listed
with the reason.
"""


@click.command(cls=DocumentedCommand, name="bench", help=_HELP)
@click.argument("kernels", nargs=-1, metavar="KERNEL...", shell_complete=common.complete_benched)
@click.option(
    "--providers",
    metavar="NAMES",
    shell_complete=common.complete_providers,
    help="Providers joined by commas, with a variant after a colon: ligerprof:lean, ligerprof:1GiB+fp32, liger:fp32,"
    " cce:exact. Default: all providers.",
)
@click.option(
    "--shapes",
    default="study",
    show_default=True,
    metavar="NAMES",
    help="study, paper, llama, A, B, C, one size such as V=32000, T=4096 or H=8192, or a model with its tokens such as"
    " llama3.1-8b@8192; several joined by commas.",
)
@click.option(
    "--pass",
    "passes",
    type=common.WordChoice([*(direction.value for direction in Direction), "all"]),
    default="all",
    show_default=True,
    help="The pass to time; full is forward and backward in one.",
)
@click.option(
    "--dtype",
    type=common.WordChoice(["bf16", "fp16", "fp32"]),
    default="bf16",
    show_default=True,
    help="Data type of the tensors.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    default=2.0,
    show_default=True,
    help="Time per shape and pass; each provider runs at least ten times regardless.",
)
@click.option("--errors/--no-errors", default=True, show_default=True, help="Measure errors against fp64.")
@click.option("--host/--no-host", default=True, show_default=True, help="Measure the host's cost of a call.")
@click.option(
    "--from",
    "earlier",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    multiple=True,
    help="Add the records of an earlier bench.jsonl; may be repeated, and alone needs no GPU.",
)
@click.option("--csv", "csv_file", type=common.FILE, help="Write every record as CSV.")
@click.option(
    "--figure", "figure_file", type=common.FILE, help="Draw times with their quantile bands: .png, .svg or .pdf."
)
@common.folder_option(f"A folder for {RECORDS}, {TABLE} and {FIGURE}.")
@common.force_option
@common.json_option
def command(as_json: bool, **options: Any) -> None:
    """Time kernels side by side and check them against fp64."""
    from ligerprof.reports.figures.style import check_format
    from ligerprof.reports.kernels import bench_json, render_bench
    from ligerprof.runs.bench.records import join_findings, read_lines

    targets = _targets(options)
    require_absent(targets, force=options["force"])
    if not options["kernels"] and not options["earlier"]:
        raise RecipeError("bench: name a kernel such as flce, or records to show with --from FILE.")
    if options["figure_file"] is not None:
        check_format(options["figure_file"].suffix)
    earlier = [read_lines(path) for path in options["earlier"]]
    findings = join_findings(*earlier, _measure(options) if options["kernels"] else [])
    _write(findings, targets, force=options["force"])
    show(lambda: bench_json(findings), lambda: render_bench(findings), as_json=as_json)


def _measure(options: Mapping[str, Any]) -> "list[Finding]":
    """Run the benchmark; unknown kernels and shapes raise before torch is imported."""
    from ligerprof.runs.bench.records import find_kernels, find_shapes

    kernels = find_kernels(options["kernels"])
    for kernel in kernels:
        find_shapes(kernel, options["shapes"])
    from ligerprof.runs.bench.accuracy import Repetitions
    from ligerprof.runs.bench.session import BenchPlan, CudaMachine, run_bench

    providers = options["providers"]
    plan = BenchPlan(
        kernels=kernels,
        providers=None if providers is None else tuple(name.strip() for name in providers.split(",") if name.strip()),
        shapes=options["shapes"],
        directions=tuple(direction for direction in Direction if options["passes"] in (direction.value, "all")),
        dtype=options["dtype"],
        repetitions=Repetitions(seconds=options["seconds"]),
        errors=options["errors"],
        host=options["host"],
    )
    return list(run_bench(plan, CudaMachine(), say))


def _targets(options: Mapping[str, Any]) -> dict[Path, str]:
    """Files to write, each with the kind of its content."""
    targets: dict[Path, str] = {}
    if options["output"] is not None:
        targets = {options["output"] / name: name for name in (RECORDS, TABLE, FIGURE)}
    named = {options["csv_file"]: TABLE, options["figure_file"]: FIGURE}
    return targets | {path: kind for path, kind in named.items() if path is not None}


def _write(findings: "Sequence[Finding]", targets: Mapping[Path, str], *, force: bool) -> None:
    from ligerprof.reports.figures.kernels import draw_bench
    from ligerprof.reports.figures.style import write_figure
    from ligerprof.runs.bench.records import write_csv, write_lines

    for path, kind in targets.items():
        if kind == FIGURE:
            write_figure(draw_bench(findings), path, force=force)
        else:
            write_new_file(path, write_csv(findings) if kind == TABLE else write_lines(findings), force=force)
        say_written(path)
