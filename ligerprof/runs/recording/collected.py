"""Gather what the processes of a command recorded: one run directory per rank, explained, the worst rank first."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ligerprof.analyzers.explain.peak import PeakReport
from ligerprof.analyzers.explain.ranks import RankPeak, RanksReport, explain_ranks
from ligerprof.errors import EmptySnapshotError, LigerprofError, OutputError
from ligerprof.gpus import find_gpu
from ligerprof.recipe.usable_memory import ColocatedEngine
from ligerprof.roles import MemoryBreakdown, Phase, Role
from ligerprof.runs.directory import RESULT
from ligerprof.runs.recording.device import DeviceReport
from ligerprof.runs.recording.live import LIVE, recorded_devices
from ligerprof.runs.recording.settings import IMPORTED
from ligerprof.runs.recording.summary import (
    PREFIX,
    RECORDING,
    LateFailure,
    RecordingState,
    RecordingSummary,
    read_summary,
)
from ligerprof.serialization import document, select, to_json
from ligerprof.snapshots import SNAPSHOT_NAME
from ligerprof.units import format_bytes

_RANK = "rank"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRank:
    """One rank of a command, with its run directory."""

    peak: RankPeak
    summary: RecordingSummary
    run: Path

    @property
    def report(self) -> PeakReport:
        return self.peak.report

    @property
    def ran_out(self) -> bool:
        """Whether an allocation failed, after the recorded steps too."""
        return self.report.out_of_memory is not None or self.summary.out_of_memory

    def to_json(self) -> dict[str, Any]:
        """An entry of `ranks` in the JSON."""
        names = ("peak_bytes", "reserved_bytes", "complete", "phases", "roles")
        late = self.summary.late_failure
        simulated = {} if self.summary.simulated is None else select(self, "summary.simulated")
        return {
            **select(self, "peak.rank", *(f"report.{name}" for name in names), "step=report.peak_step"),
            "oom": to_json(self.report.out_of_memory) or (None if late is None else _late_json(late)),
            **select(self, "phase=report.peak_phase", "report.growth", "report.suggestions", "summary.steps"),
            **select(self, "summary.pid"),
            **simulated,
            **select(self, "models", "engine", "run"),
        }

    @property
    def engine(self) -> ColocatedEngine | None:
        """What vLLM may have next to a simulated training that generates; None for another, or if memory ran out."""
        policy = next((model for model in self.summary.models if model["role"] == "policy"), None)
        simulated = self.summary.simulated
        if policy is None or simulated is None or self.ran_out or not policy["kv_token_bytes"]:
            return None
        if not {Phase.GENERATION.value, Phase.FORWARD.value} <= set(policy["phases"]):
            return None
        gpu, roles = find_gpu(str(simulated["gpu"])), self.report.roles
        return ColocatedEngine(
            gpu_bytes=gpu.memory_bytes,
            usable_bytes=gpu.usable_bytes,
            training_bytes=self.report.reserved_bytes,
            held_bytes=roles[Role.PARAMETERS] + roles[Role.OPTIMIZER_STATES],
            weights_bytes=2 * policy["elements"],
            token_bytes=policy["kv_token_bytes"],
        )

    @property
    def models(self) -> list[dict[str, Any]]:
        """The models that ran, with the cache of keys and values at the peak of the only one that generates."""
        cache_bytes = self.report.roles[Role.KV_CACHE]
        generating = [model for model in self.summary.models if Phase.GENERATION.value in model["phases"]]
        return [
            {**model, "kv_cache_bytes": cache_bytes if generating == [model] else None if generating else 0}
            for model in self.summary.models
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandReport:
    """What a command held at its peaks.

    Attributes:
        ranks: the worst first: those that ran out of memory, then by peak.
        compared: the same ranks, compared with each other; None if nothing was recorded.
        notes: one sentence each, without a full stop.
        devices: the GPUs as all recorded processes noted them; empty if simulated.
    """

    command: tuple[str, ...]
    exit_code: int
    output: Path
    ranks: tuple[RecordedRank, ...]
    compared: RanksReport | None
    notes: tuple[str, ...]
    devices: tuple[DeviceReport, ...] = ()

    @property
    def ran_out(self) -> bool:
        """Whether the command failed after an allocation had failed."""
        return self.exit_code != 0 and any(rank.ran_out for rank in self.ranks)

    def to_json(self) -> dict[str, Any]:
        """The object of `ligerprof run --json`."""
        causes = [] if self.compared is None else self.compared.causes_json()
        return document(
            "run",
            select(self, "command", "exit_code", "ranks", "devices", "notes"),
            {"causes": causes, "run": str(self.output)},
        )


def clear_recordings(output: Path) -> None:
    """Remove what an earlier command left in a folder; raises OutputError if a file cannot be removed."""
    try:
        for folder in output.iterdir():
            if folder.name.startswith((PREFIX, _RANK)) and (folder / RECORDING).is_file():
                shutil.rmtree(folder)
        for name in (SNAPSHOT_NAME, RECORDING, LIVE, RESULT, IMPORTED):
            (output / name).unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"{output}: cannot be cleared ({error.strerror}). Choose another -o.") from None


_Process = tuple[Path, RecordingSummary]


def arrange(output: Path, notes: list[str], *, is_simulated: bool = False) -> dict[int, _Process]:
    """Name the folders of a command's processes by rank, and add to `notes` what is not a rank."""
    chosen = dict(_numbered(_complete(_processes(output, notes, is_simulated=is_simulated), notes), notes))
    return {
        rank: (_place(output, rank, folder, alone=len(chosen) == 1), summary)
        for rank, (folder, summary) in chosen.items()
    }


def collect(
    output: Path,
    command: Sequence[str],
    exit_code: int,
    adapt: Callable[[PeakReport], PeakReport] = lambda report: report,
    *,
    is_simulated: bool = False,
) -> CommandReport:
    """Name the folders of a command's processes by rank, and explain each; a single rank's files move to `output`."""
    notes: list[str] = []
    arranged = arrange(output, notes, is_simulated=is_simulated)
    ranks: list[RecordedRank] = []
    for rank, (folder, summary) in arranged.items():
        try:
            (explained,) = explain_ranks({rank: folder / SNAPSHOT_NAME}).ranks
            peak = replace(explained, report=adapt(explained.report), weights=summary.weights)
            ranks.append(RecordedRank(peak=peak, summary=summary, run=folder))
        except EmptySnapshotError:
            notes.append(f"rank {rank} allocated nothing on the GPU")
        except LigerprofError as error:
            notes.append(f"rank {rank} cannot be explained: {str(error).rstrip('.')}")
    ranks.sort(key=lambda rank: (not rank.ran_out, -rank.report.peak_bytes, rank.peak.rank))
    for recorded in ranks:
        notes += _notes_of(recorded, of_several=len(ranks) > 1)
    compared = RanksReport(ranks=tuple(rank.peak for rank in ranks)) if ranks else None
    devices = recorded_devices(output, {rank: folder for rank, (folder, _) in arranged.items()})
    notes += [note for device in devices for note in device.notes()]
    return CommandReport(
        command=tuple(command),
        exit_code=exit_code,
        output=output,
        ranks=tuple(ranks),
        compared=compared,
        notes=tuple(notes),
        devices=devices,
    )


def _processes(output: Path, notes: list[str], *, is_simulated: bool) -> list[_Process]:
    """The processes that used a CUDA device, in the order of their starts."""
    found = []
    for folder in sorted(output.glob(f"{PREFIX}*")):
        try:
            found.append((folder, read_summary(folder)))
        except LigerprofError as error:
            notes.append(str(error).rstrip("."))
    imported = output / IMPORTED
    if not found and not notes:
        notes.append(f"nothing was recorded: {_why_nothing(was_imported=imported.exists(), is_simulated=is_simulated)}")
    with suppress(OSError):
        imported.unlink(missing_ok=True)
    return sorted(found, key=lambda each: each[1].started_us)


def _why_nothing(*, was_imported: bool, is_simulated: bool) -> str:
    if not was_imported:
        return (
            "no Python process of the command imported torch, or those that did were started without ligerprof's"
            " folder on PYTHONPATH, as by python -I, -E or -S, in a container, or where a script sets PYTHONPATH"
        )
    devices = ("nvidia[0-9]*", "kfd", "dxg")
    found = is_simulated or any(next(Path("/dev").glob(pattern), None) for pattern in devices)
    here = "" if found else "; this machine has none"
    return f"no Python process of the command used a CUDA device through torch{here}"


def _complete(processes: Sequence[_Process], notes: list[str]) -> Iterator[_Process]:
    """The processes with a snapshot; those that only looked at the device are left out if others trained."""
    trains = any(summary.steps for _, summary in processes)
    for folder, summary in processes:
        name = f"process {summary.pid}" if summary.rank is None else f"rank {summary.rank} (process {summary.pid})"
        if not (folder / SNAPSHOT_NAME).is_file():
            is_lost = summary.state is RecordingState.LOST
            lost = "lost its recording" if is_lost else "was killed before it wrote its recording"
            # a process that was killed has not written down how far it came
            where = f", in step {summary.steps}" if summary.steps else ""
            notes.append(f"{name} {lost}{where}")
        elif trains and not summary.steps and not summary.out_of_memory:
            notes.append(f"{name} used CUDA without a training step; its recording is in {folder}")
        else:
            yield folder, summary


def _numbered(processes: Iterator[_Process], notes: list[str]) -> Iterator[tuple[int, _Process]]:
    """One process for each rank; of several with one rank, such as restarted ones, the worst.

    Processes that no launcher numbered get the free numbers, in the order of their starts.
    """
    named: dict[int, list[_Process]] = {}
    others: list[_Process] = []
    for process in processes:
        rank = process[1].rank
        (others if rank is None else named.setdefault(rank, [])).append(process)

    for rank, each in named.items():
        worst, *rest = sorted(each, key=lambda process: (not process[1].out_of_memory, -process[1].counter_peak_bytes))
        for folder, _ in rest:
            notes.append(f"rank {rank} ran in several processes; another recording of it is in {folder}")
        yield rank, worst
    free = (number for number in range(len(named) + len(others)) if number not in named)
    yield from zip(free, others, strict=False)


def _place(output: Path, rank: int, folder: Path, *, alone: bool) -> Path:
    """Rename a process's folder; where that fails, it keeps its name."""
    if alone:
        try:
            for file in (SNAPSHOT_NAME, RECORDING):
                (folder / file).rename(output / file)
        except OSError:
            return folder
        with suppress(OSError):
            (folder / LIVE).rename(output / LIVE)
        with suppress(OSError):
            folder.rmdir()
        return output
    try:
        return folder.rename(output / f"{_RANK}{rank}")
    except OSError:
        return folder


def _notes_of(recorded: RecordedRank, *, of_several: bool) -> Iterator[str]:
    summary, peak_bytes = recorded.summary, recorded.report.peak_bytes
    who = f"rank {recorded.peak.rank}: " if of_several else ""
    for note in summary.notes:
        yield f"{who}{note}"
    late = summary.late_peak
    if late is not None and late.peak_bytes > peak_bytes:
        peak = format_bytes(late.peak_bytes)
        steps = late.steps
        one = f"step {late.step}" if steps.first == late.step else f"one of steps {steps.first} to {late.step}"
        yield f"{who}{one} reached a higher peak, {peak}; --steps {steps} records it"
    failure = summary.late_failure
    if failure is not None:
        yield (
            f"{who}memory ran out in step {failure.step}, after the recorded steps, with"
            f" {format_bytes(failure.allocated_bytes)} allocated; --steps {failure.step} records it"
        )


def _late_json(late: LateFailure) -> dict[str, Any]:
    unknown = MemoryBreakdown(roles={Role.UNATTRIBUTED: late.allocated_bytes})
    sizes = {"requested_bytes": late.requested_bytes, "allocated_bytes": late.allocated_bytes, "reserved_bytes": None}
    return {**sizes, "phase": None, "step": late.step, "roles": unknown.to_json(), "blocks": []}
