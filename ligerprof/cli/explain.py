"""`ligerprof explain`: what the memory at the peak of a snapshot belongs to."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ligerprof.cli import common_options as common
from ligerprof.cli.command import DocumentedCommand
from ligerprof.cli.output import limit_json, print_markdown, show, write_output
from ligerprof.cli.own_file import OwnConfig, changed_copy_option, own_file_option
from ligerprof.errors import DoesNotFitError
from ligerprof.files import require_absent
from ligerprof.roles import View
from ligerprof.snapshots import SNAPSHOT_NAME
from ligerprof.snapshots.collector import collector_paused
from ligerprof.snapshots.watch import watched
from ligerprof.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ligerprof.analyzers.attribution.rules import UserRule
    from ligerprof.analyzers.explain.peak import PeakReport
    from ligerprof.runs.recording.device import DeviceReport

_MANY_GROUPS = 10_000


@click.command(cls=DocumentedCommand, name="explain")
@click.argument("snapshot", metavar="SNAPSHOT|RUN|FOLDER", type=common.INPUT)
@click.option(
    "--device-index", type=click.IntRange(min=0), metavar="N", help="The GPU. Default: the GPU with the highest peak."
)
@common.top_option
@common.word_option("--by", View, "What the first table sums the bytes by.", View.ROLE)
@common.size_option("--max-peak", "max_peak_bytes", "Exit with 3 if the peak is higher, such as 20GiB.")
@click.option(
    "--rules",
    "rules_path",
    type=click.Path(exists=True, dir_okay=False),
    help="Your own rules for roles, TOML or JSON.",
)
@click.option("--stacks", is_flag=True, help="Group blocks by stack too, and show each stack.")
@click.option(
    "--alloc-confs",
    "all_settings",
    is_flag=True,
    help="Replay the recording under all sensible PYTORCH_CUDA_ALLOC_CONFs, and list them.",
)
@own_file_option
@changed_copy_option("-o", "--output", what="the first suggestion")
@click.option("--ranks", "all_ranks", is_flag=True, help="Compare the ranks of RUN, a step on several GPUs.")
@click.option("--html", "html_path", type=common.FILE, help="Also write an HTML page.")
@common.force_option
@common.markdown_option
@common.json_option
@collector_paused()
@watched()
def command(  # noqa: PLR0913 - one argument per option
    *,
    snapshot: Path,
    device_index: int | None,
    top: int,
    by: View,
    max_peak_bytes: int | None,
    rules_path: str | None,
    stacks: bool,
    all_settings: bool,
    configs: tuple[str, ...],
    copies: tuple[Path, ...],
    all_ranks: bool,
    html_path: Path | None,
    force: bool,
    as_markdown: bool,
    as_json: bool,
) -> None:
    """Show what the memory at the peak belongs to: roles, then blocks with module or frame.

    SNAPSHOT is a file of torch.cuda.memory._dump_snapshot(), plain or compressed with gzip or
    xz, or - for standard input; RUN is a directory that `ligerprof step` or `ligerprof.record()`
    wrote. FOLDER has one snapshot or run directory per rank of a distributed run: the ranks are
    listed, the worst first, with what differs between them; --ranks does so for RUN. No code in the
    file is run.
    """
    from ligerprof.analyzers.explain.analysis import analyze
    from ligerprof.runs.recording.summary import recorded_weights, simulated_gpu

    rules = _rules(rules_path)
    own = OwnConfig(configs, copies, force=force)
    sources = _ranks(snapshot, of_run=all_ranks)
    if sources:
        if stacks or as_markdown or all_settings or by is not View.ROLE:
            raise click.UsageError("--stacks, --format, --alloc-confs and --by need one rank: give its file.")
        from ligerprof.analyzers.explain.ranks import explain_ranks
        from ligerprof.reports.diff import render_ranks

        if html_path is not None:
            require_absent([html_path], force=force)
        ranks = explain_ranks(sources, device_index=device_index, rules=rules, weights_of=recorded_weights)
        ranks = replace(ranks, ranks=tuple(replace(each, report=own.in_files(each.report)) for each in ranks.ranks))
        if html_path is not None:
            from ligerprof.reports.page.peak import render_ranks_page

            worst = analyze(ranks.worst.source, device_index=device_index, rules=rules)
            title = _title(snapshot.name, ranks.worst.source)
            devices = _devices(snapshot, {rank: path.parent for rank, path in sources.items()})
            write_output(html_path, render_ranks_page(ranks, worst, source=title, devices=devices), force=force)
        judged = limit_json(max_peak_bytes, ranks.highest.report.peak_bytes)
        show(
            lambda: {**ranks.to_json(), "source": str(snapshot), **judged},
            lambda: render_ranks(ranks, top=top),
            as_json=as_json,
        )
        own.write(ranks.worst.report)
        _check_peak(ranks.highest.report.peak_bytes, max_peak_bytes)
        return
    if html_path is not None:
        require_absent([html_path], force=force)
    analysis = analyze(snapshot, device_index=device_index, rules=rules, stacks=stacks, all_settings=all_settings)
    if html_path is not None:
        from ligerprof.reports.page.peak import render_peak_page

        title = _title(snapshot.name, snapshot)
        devices = _devices(snapshot, {0: snapshot})
        write_output(html_path, render_peak_page(analysis, source=title, devices=devices), force=force)
    report = own.in_files(analysis.peak)
    if len(report.blocks) > _MANY_GROUPS:
        # their JSON takes as much memory as the analysis; freeing that of other recordings only takes time
        del analysis
    gpu = simulated_gpu(snapshot)
    if gpu is not None and not as_json:
        click.echo(f"Simulated for {gpu}.")
    if as_markdown and not as_json:
        from ligerprof.reports.markdown import peak_markdown

        print_markdown(peak_markdown(report, top=top))
    else:
        judged = limit_json(max_peak_bytes, report.peak_bytes) | ({} if gpu is None else {"simulated": gpu})
        show(
            lambda: {**report.to_json(), "source": str(snapshot), **judged},
            lambda: _text(report, by, top, all_settings=all_settings),
            as_json=as_json,
        )
    own.write(report)
    _check_peak(report.peak_bytes, max_peak_bytes)


def _devices(run: Path, ranks: Mapping[int, Path]) -> "tuple[DeviceReport, ...]":
    from ligerprof.runs.recording.live import recorded_devices

    return recorded_devices(run, ranks)


def _title(name: str, recording: Path) -> str:
    from ligerprof.runs.recording.summary import simulated_gpu

    gpu = simulated_gpu(recording)
    return name if gpu is None else f"{name} (simulated for {gpu})"


def _rules(path: str | None) -> Sequence["UserRule"]:
    if path is None:
        return ()
    from ligerprof.analyzers.attribution.rules import read_rules

    return read_rules(path)


def _ranks(source: Path, *, of_run: bool) -> Mapping[int, Path]:
    """The snapshots to compare, by rank; {} for a single snapshot."""
    from ligerprof.runs.directory import recorded_ranks
    from ligerprof.snapshots.reader import rank_snapshots

    if of_run and not (source.is_dir() and (source / SNAPSHOT_NAME).exists()):
        raise click.UsageError(f"--ranks needs a run directory, which {source} is not.")
    if of_run:
        return recorded_ranks(source)
    return rank_snapshots(source) if source.is_dir() else {}


def _text(report: "PeakReport", by: View, top: int, *, all_settings: bool) -> "RenderableType":
    from ligerprof.reports.peak import render_peak

    peak = render_peak(report, by=by, top=top)
    if not all_settings:
        return peak
    from rich.console import Group

    from ligerprof.reports.peak import render_settings

    return Group(peak, render_settings(report))


def _check_peak(peak_bytes: int, max_peak_bytes: int | None) -> None:
    if max_peak_bytes is not None and peak_bytes > max_peak_bytes:
        peak, limit = format_bytes(peak_bytes), format_bytes(max_peak_bytes)
        raise DoesNotFitError(f"the peak of {peak} is over --max-peak {limit}.")
