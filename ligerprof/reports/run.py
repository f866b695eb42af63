"""Render `ligerprof run`: what was recorded, the worst rank, and what holds its peak."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from ligerprof.gpus import find_gpu
from ligerprof.reports.diff import render_ranks
from ligerprof.reports.peak import largest_bytes, render_peak
from ligerprof.reports.terminal import listing_table, stacked
from ligerprof.runs.recording.collected import CommandReport, RecordedRank
from ligerprof.runs.recording.device import DeviceLedger, DeviceReport
from ligerprof.runs.recording.live import Live
from ligerprof.runs.recording.summary import RECORDING, RecordingSummary
from ligerprof.units import format_bytes, format_mib, in_one_unit

_MOST_ROWS, _MOST_NAMES = 6, 4


@in_one_unit(lambda report, **_: max((largest_bytes(rank.report) for rank in report.ranks), default=0))
def render_run(report: CommandReport, *, top: int = 10) -> RenderableType:
    """Lay out the report, at most 100 columns wide, with `top` rows of blocks."""
    parts: list[RenderableType] = []
    if report.compared is not None and len(report.ranks) > 1:
        parts.append(render_ranks(report.compared, top=top))
    for worst in report.ranks[:1]:
        parts += [*_lines(worst, of_several=len(report.ranks) > 1), *_simulated_lines(worst.summary), *_models(worst)]
        parts += _engine(worst)
        parts.append(render_peak(worst.report, top=top))
    for device in report.devices:
        parts += _device_parts(device)
    parts += [f"Note: {note}." for note in report.notes]
    if report.ranks:
        parts.append(f"The recording is in {report.output}; `ligerprof explain {report.output}` reads it.")
    return stacked(*parts)


def _models(recorded: RecordedRank) -> Iterator[str]:
    """Whose weights and cache a loop of several models holds."""
    models = recorded.models
    if len(models) > 1:
        yield "Models:"
        lines: Counter[str] = Counter()
        for model in models:
            dtypes = " and ".join(model["dtypes"])
            cache = f", cache {format_bytes(model['kv_cache_bytes'])}" if model["kv_cache_bytes"] else ""
            held = f"{format_bytes(model['parameters_bytes'])} of weights in {dtypes}{cache}"
            lines[f"{model['role'] or 'another'}: {model['name']}, {held}; {', '.join(model['phases'])}"] += 1
        yield from (f"- {line}{f', {count} of them' * (count > 1)}" for line, count in lines.items())


def _engine(recorded: RecordedRank) -> Iterator[str]:
    """What an engine for generation may have of the GPU."""
    engine = recorded.engine
    if engine is None:
        return
    yield "A vLLM engine in this process, by arithmetic that nothing measured (docs/run.md has its rules):"
    for when, sleeps in (("awake while it trains", False), ("asleep while it trains", True)):
        share, tokens = engine.utilization(sleeps=sleeps), engine.tokens(sleeps=sleeps)
        room = f"room for {tokens:,} tokens of keys and values" if tokens else "no room for keys and values"
        yield f"- {when}: gpu_memory_utilization at most {share:.2f}, {room}"


def _device_parts(device: DeviceReport) -> list[RenderableType]:
    table = listing_table(*DEVICE_HEADS, right=DEVICE_HEADS[2:], rows=device_rows(device.fullest))
    return [device_sentence(device), table]


DEVICE_HEADS = ("process", "part, MiB", "in use", "of tensors")


def device_sentence(device: DeviceReport) -> str:
    """When the whole GPU was at its fullest, and what it held."""
    fullest = device.fullest
    when = f"at the {fullest.moment.event.replace('_', ' ')} of" if fullest.moment.event != "step" else "as"
    used = f"{format_bytes(fullest.moment.used_bytes)} of {format_bytes(device.total_bytes)}"
    began = f"{fullest.process} began step {fullest.moment.step}" if when == "as" else fullest.process
    return f"The whole GPU, the fullest of {len(device.ledgers)} looks, {when} {began}: {used} in use."


def device_rows(ledger: DeviceLedger) -> list[tuple[str, str, str, str]]:
    """The parts of a GPU's memory, under `DEVICE_HEADS`."""
    return [
        (
            row.process or "",
            row.part,
            format_mib(row.size_bytes),
            "" if row.allocated_bytes is None else format_mib(row.allocated_bytes),
        )
        for row in ledger.rows
    ]


def _simulated_lines(summary: RecordingSummary) -> Iterator[str]:
    """Main memory, what was simulated, and what the simulation made up."""
    simulated = summary.simulated
    if simulated is None:
        if summary.main_memory_bytes:
            whole, pinned = format_bytes(summary.main_memory_bytes), format_bytes(summary.pinned_bytes)
            yield f"The process took {whole} of main memory at most; torch page-locked {pinned} at most."
        return
    gpu = find_gpu(str(simulated["gpu"]))
    figures = "" if gpu.measured else ", whose figures come from data sheets"
    yield f"Simulated for {gpu.title}{figures}; this machine's GPU was not used."
    if outside_bytes := simulated.get("outside_bytes"):
        yield f"Outside torch's allocator a process has about {format_bytes(outside_bytes)} more, measured on H200s."
    if simulated.get("host_bytes") or simulated.get("pinned_bytes"):
        host, pinned = (format_bytes(simulated.get(key, 0)) for key in ("host_bytes", "pinned_bytes"))
        yield f"The program's tensors took {host} of main memory at most, besides {pinned} page-locked."
    for name in simulated.get("stand_ins", ()):
        yield f"{name} was not on this machine: its configuration is the catalog's, and each byte of a text is a token."
    for name in simulated.get("packages", ()):
        yield f"{name} is not installed: its functions took what its source allocates, which no GPU has measured."
    made_up = simulated["made_up"]
    shapes = [row for row in made_up if row["is_shape"]]
    if made_up:
        yield f"Values that the model computes were made up where the program read them, {_times(made_up)}:"
        for row in made_up[:_MOST_ROWS]:
            means = "; the size of a tensor depends on it" if row["is_shape"] else ""
            means += "; the program branches on it" if row.get("is_branch") else ""
            yield f"- {row['what']} at {_short(row['place'])}, {_times([row])}{means}"
        if len(made_up) > _MOST_ROWS:
            yield f"- and at {len(made_up) - _MOST_ROWS} more places, in {RECORDING}"
        yield (
            "The peak may depend on those that decide about sizes."
            if shapes
            else "They decide about no size; the program may branch on them."
        )
    yield from _files_lines(simulated.get("not_written", ()), simulated.get("unchanged", ()))


def _files_lines(new: Sequence[str], existing: Sequence[str]) -> Iterator[str]:
    def listed(paths: Sequence[str]) -> str:
        names = ", ".join(map(_short, paths[:_MOST_NAMES]))
        more = len(paths) - _MOST_NAMES
        return f"{names} and {more} more" if more > 0 else names

    if new:
        yield f"Not kept, since what a simulated run writes follows from made-up values: {listed(new)}."
    if existing:
        yield f"Not changed, although the program wrote to them or removed them: {listed(existing)}."


def _short(place: str) -> str:
    """A path as seen from here, or from the folder of Python's packages."""
    return place.rpartition("/site-packages/")[2].removeprefix(f"{Path.cwd()}{os.sep}")


def _times(rows: Iterable[Mapping[str, Any]]) -> str:
    times = sum(row["times"] for row in rows)
    return "once" if times == 1 else f"{times} times"


def _lines(recorded: RecordedRank, *, of_several: bool) -> list[str]:
    """The steps that were recorded, and the one with the peak."""
    summary, step = recorded.summary, recorded.report.peak_step
    who = f"Rank {recorded.peak.rank} ran" if of_several else "The command ran"
    if not summary.steps:
        return [f"{who} no training step."]
    ran = f"{who} {summary.steps} training step{'s' if summary.steps > 1 else ''}"
    if step is None:
        return [f"{ran}."]
    where = f"in step {step}" if step else "before the first step"
    if summary.last_recorded is not None:
        ran += f", recorded up to step {summary.last_recorded}"
    return [f"{ran}; the peak of {format_bytes(recorded.report.peak_bytes)} came {where}."]


_WATCH_MOST_ROWS = 8


@in_one_unit(lambda live, **_: live.limit_bytes)
def watch_lines(live: Live, *, name: str = "") -> list[str]:
    """The newest figures, and what grows."""
    last = live.samples[-1]
    now = f"{format_bytes(last.allocated_bytes)} allocated, {format_bytes(last.reserved_bytes)} reserved"
    peak = f"peak {format_bytes(last.peak_bytes)} of {format_bytes(live.limit_bytes)}"
    when = f"{'ended after' if live.ended else 'in'} step {last.step}, after {last.seconds:,.1f} s"
    lines = [f"{name}{when}: {now}, {peak}."]
    if live.fails_in_step is not None:
        failure = "" if live.ended else f" At this rate, memory runs out in about step {live.fails_in_step}."
        lines.append(f"{name}It grows by {format_bytes(live.growth_bytes)} per step.{failure}")
    return lines


def render_watch(live: Live, *, name: str = "") -> RenderableType:
    """The lines, and a table of the last steps with their roles in MiB."""
    shown = live.samples[-_WATCH_MOST_ROWS:]
    roles = list(dict.fromkeys(role for sample in shown for role in sample.roles))
    heads = ("allocated", "reserved", "peak", *roles, "other")
    rows = []
    for sample in shown:
        known = [sample.roles.get(role, 0) for role in roles]
        sizes = (sample.allocated_bytes, sample.reserved_bytes, sample.peak_bytes, *known)
        other = sample.allocated_bytes - sum(known)
        rows.append((str(sample.step), *map(format_mib, sizes), format_mib(other)))
    table = listing_table("step, MiB", *heads, right=heads, rows=rows)
    return stacked(*watch_lines(live, name=name), table)
