"""`ligerprof watch`: the memory of a running `ligerprof run`."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from ligerprof.cli.command import DocumentedCommand
from ligerprof.cli.common_options import FOLDER, json_option
from ligerprof.cli.output import print_json, say
from ligerprof.errors import MissingDependencyError, RunDirectoryError
from ligerprof.serialization import document, to_json

if TYPE_CHECKING:
    from ligerprof.runs.recording.live import Live

_LEAST_SECONDS = 0.1


@click.command(cls=DocumentedCommand, name="watch")
@click.argument("run", type=FOLDER)
@click.option("--once", is_flag=True, help="Show the newest figures and exit.")
@click.option(
    "--interval",
    type=click.FloatRange(min=_LEAST_SECONDS),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two looks.",
)
@click.option("--tensorboard", "folder", type=FOLDER, help="Also write the figures for TensorBoard into this folder.")
@json_option
def command(run: Path, once: bool, interval: float, folder: Path | None, as_json: bool) -> None:
    """Show a running command that `ligerprof run` records, until it ends or Ctrl-C.

    RUN is the folder of the recordings, such as runs/001. For each process: allocated and reserved
    bytes, the peak so far, weights, gradients and optimizer states at the beginning of its last
    steps; and if memory grows from step to step, by how much and in which step it will run out.
    The figures are renewed at most once per step.

    If the program uses wandb, the same figures are in its log.
    """
    with _summaries(folder) as write:
        for processes in _looks(run, interval, once=once):
            write(processes)
            if as_json:
                print_json(document("watch", {"processes": [_values(name, live) for name, live in processes.items()]}))
            else:
                _show(processes)


def _looks(run: Path, interval: float, *, once: bool) -> Iterator[Mapping[str, "Live"]]:
    """The processes when one has new figures, until all end; raises RunDirectoryError if one ends without a word."""
    if not run.is_dir():
        raise RunDirectoryError(f"{run}: no such folder. Give that of a running `ligerprof run`, such as runs/001.")
    shown: Any = None
    said = False
    while True:
        if not run.is_dir():
            raise RunDirectoryError(f"{run}: the command ended, and nothing was recorded.")
        processes = _read(run)
        if processes != shown and processes:
            shown = processes
            yield processes
        if once and not processes:
            raise RunDirectoryError(f"{run}: no process of a `ligerprof run` has begun a step there.")
        if once or (processes and all(live.ended for live in processes.values())):
            return
        gone = [name for name, live in processes.items() if not live.ended and not _is_alive(live.pid)]
        if gone:
            raise RunDirectoryError(f"{run}: {', '.join(gone)} ended without finishing its recording.")
        if not processes and not said:
            said = True
            say(f"waiting for the first step in {run}")
        time.sleep(interval)


def _read(run: Path) -> dict[str, "Live"]:
    from ligerprof.runs.recording.live import LIVE, Live

    found = {}
    for path in sorted([run / LIVE, *run.glob(f"process-*/{LIVE}"), *run.glob(f"rank*/{LIVE}")]):
        # the folder of a process is renamed when its command ends
        if path.is_file():
            name = "the process" if path.parent == run else path.parent.name
            found[name] = Live.read(path.parent)
    return found


def _is_alive(pid: int) -> bool:
    """Whether a process exists; one in another container seems not to."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _values(name: str, live: "Live") -> dict[str, Any]:
    fields = {each: to_json(getattr(live, each)) for each in type(live).__slots__}
    return {"name": name, **fields, "growth_bytes": live.growth_bytes, "fails_in_step": live.fails_in_step}


def _show(processes: Mapping[str, "Live"]) -> None:
    """Tables in a terminal, which replace those before; otherwise lines."""
    from ligerprof.reports.run import render_watch, watch_lines
    from ligerprof.reports.terminal import console

    alone = len(processes) == 1
    target = console()
    if sys.stdout.isatty():
        target.clear()
    for name, live in processes.items():
        title = "" if alone else f"{name}: "
        if sys.stdout.isatty() or live.ended:
            target.print(render_watch(live, name=title))
        else:
            for line in watch_lines(live, name=title):
                click.echo(line)


@contextmanager
def _summaries(folder: Path | None) -> Iterator[Callable[[Mapping[str, "Live"]], None]]:
    """A function that writes every sample of processes once, as scalars for TensorBoard; nothing without a folder."""
    if folder is None:
        yield lambda _processes: None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MissingDependencyError(
            "--tensorboard needs tensorboard. Install it with: pip install tensorboard."
        ) from None
    from ligerprof.runs.recording.live import scalars

    writers: dict[int, Any] = {}
    written: dict[int, int] = {}

    def write(processes: Mapping[str, "Live"]) -> None:
        alone, make = len(processes) == 1, cast(Any, SummaryWriter)
        for name, live in processes.items():
            if live.pid not in writers:
                writers[live.pid] = make(log_dir=str(folder if alone else folder / name))
            for number, sample in enumerate(live.samples, 1):
                if sample.step <= written.get(live.pid, -1) and not live.ended:
                    continue
                for tag, value in scalars(replace(live, samples=live.samples[:number])).items():
                    writers[live.pid].add_scalar(tag, value, sample.step)
                written[live.pid] = sample.step
            writers[live.pid].flush()

    try:
        yield write
    finally:
        for writer in writers.values():
            writer.close()
