"""`ligerprof trace`: busy time, kernels and idle gaps of a profiler trace."""

from pathlib import Path

import click

from ligerprof.cli.command import DocumentedCommand
from ligerprof.cli.common_options import INPUT, json_option, top_option
from ligerprof.cli.output import show


@click.command(cls=DocumentedCommand, name="trace")
@click.argument("traces", metavar="TRACE|RUN [TRACE|RUN]", nargs=-1, required=True, type=INPUT)
@top_option
@json_option
def command(traces: tuple[Path, ...], top: int, as_json: bool) -> None:
    """Show how busy the GPU was in a profiled step, which kernels ran, and what the GPU waited for.

    TRACE is a Chrome trace of torch.profiler, plain or compressed with gzip or xz, or - for standard
    input. RUN is a run directory of `ligerprof step` or a folder with *.pt.trace.json files; the
    newest is read. Two traces are compared.
    """
    from ligerprof.analyzers.trace.analysis import TraceDifference, analyze
    from ligerprof.analyzers.trace.events import read_trace
    from ligerprof.reports.trace import render_trace, render_trace_difference
    from ligerprof.runs.directory import find_trace

    if len(traces) > 2:
        raise click.UsageError(f"{len(traces)} traces given. Give one, or two to compare.")
    reports = [analyze(read_trace(find_trace(path) if path.is_dir() else path)) for path in traces]
    if len(reports) == 1:
        (report,) = reports
        show(lambda: report.to_json(top=top), lambda: render_trace(report, top=top), as_json=as_json)
        return
    change = TraceDifference(before=reports[0], after=reports[1])
    show(lambda: change.to_json(top=top), lambda: render_trace_difference(change, top=top), as_json=as_json)
