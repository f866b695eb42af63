"""`ligerprof trace`: busy time, kernels and idle gaps of a profiler trace."""

from pathlib import Path

import click

from ligerprof.analyzers.trace.analysis import analyze
from ligerprof.analyzers.trace.difference import TraceDifference
from ligerprof.analyzers.trace.events import read_trace
from ligerprof.analyzers.trace.report import TraceReport
from ligerprof.cli.common_options import json_option, top_option
from ligerprof.cli.output import print_json
from ligerprof.runs.directory import find_trace

_MOST_TRACES = 2


@click.command(name="trace", short_help="Show busy time, gaps and launches of a profiler trace.")
@click.argument(
    "traces", metavar="TRACE|RUN [TRACE|RUN]", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path)
)
@top_option
@json_option
def command(traces: tuple[Path, ...], top: int, as_json: bool) -> None:
    """Show how busy the GPU was in a profiled step, which kernels ran, and what the GPU waited for.

    TRACE is a Chrome trace of torch.profiler, plain or compressed with gzip or xz. RUN is a run
    directory of `ligerprof step` or a folder with *.pt.trace.json files; the newest is read. Two
    traces are compared.
    """
    if len(traces) > _MOST_TRACES:
        raise click.UsageError(f"{len(traces)} traces given. Give one, or two to compare.")
    reports = [analyze(read_trace(find_trace(path) if path.is_dir() else path)) for path in traces]
    found = reports[0] if len(reports) == 1 else TraceDifference(before=reports[0], after=reports[1])
    if as_json:
        print_json(found.to_json(top=top))
        return
    from ligerprof.reports.terminal import console
    from ligerprof.reports.trace import render_trace, render_trace_difference

    if isinstance(found, TraceReport):
        console().print(render_trace(found, top=top))
    else:
        console().print(render_trace_difference(found, top=top))
