"""Measure every kernel against torch, liger-kernel and cut-cross-entropy on one GPU, and print which goals are met.

    python benchmarks/kernels.py measure benchmarks/results/kernels-h200.jsonl
    python benchmarks/kernels.py goals benchmarks/results/kernels-h200.jsonl

`measure` appends each record when it is complete. When the time is up, it lists the cells that did not start; then it
prints the goals. `goals` does not require a GPU. For tables and figures: ligerprof bench --from RESULTS
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ligerprof.runs.bench.operations import OPERATIONS
from ligerprof.runs.bench.records import (
    Direction,
    ErrorRecord,
    Finding,
    HostRecord,
    MissingRecord,
    Record,
    Subject,
    TimeRecord,
    find_shapes,
    join_findings,
    read_lines,
    write_lines,
)

LEAN, BALANCED, LARGE = "ligerprof:lean", "ligerprof", ("ligerprof:1GiB", "ligerprof:4GiB")
EXACT = ("ligerprof:lean+fp32", "ligerprof:fp32")
PEERS = ("torch", "torch-compile", "torch-linear-ce", "liger", "liger:fp32", "cce")
# of the fused loss: all providers for shapes with goals, fewer for the others
FLCE_PROVIDERS = (BALANCED, LEAN, *LARGE, *EXACT, *PEERS)
FLCE_OVERVIEW = (BALANCED, LEAN, LARGE[-1], "torch", "torch-compile", "liger", "cce")
ELEMENTWISE = ("rms", "rope", "swiglu", "geglu", "layernorm", "add_rms")
WORKSPACE_MIB = 256
SLACK = 1.03


@dataclasses.dataclass(frozen=True)
class Cell:
    kernel: str
    shape: str
    checked: bool = False
    seconds: float = 0.5
    settle_seconds: float = 0.02


SECTIONS: dict[str, tuple[Cell, ...]] = {
    "study": (
        *(Cell("flce", shape, checked=True, seconds=2.0, settle_seconds=0.1) for shape in "ABC"),
        *(Cell(kernel, "C", checked=True, seconds=1.0) for kernel in (*ELEMENTWISE, "ce")),
    ),
    "paper": tuple(
        Cell(kernel, shape.name) for kernel in ("ce", *ELEMENTWISE[:-1]) for shape in find_shapes(kernel, "paper")
    ),
    "llama": tuple(
        Cell(kernel, model, settle_seconds=0.1 if kernel == "flce" else 0.02)
        for model in ("llama3.2-1b", "llama3.2-3b", "llama3.1-70b")
        for kernel in ("flce", *ELEMENTWISE[:3])
    ),
}


def measure(results: Path, cells: Sequence[Cell], minutes: float) -> None:
    from ligerprof.runs.bench.accuracy import Repetitions
    from ligerprof.runs.bench.session import BenchPlan, CudaMachine, run_bench

    machine = CudaMachine()
    deadline = time.monotonic() + 60 * minutes
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a", encoding="utf-8") as lines:
        for number, cell in enumerate(cells):
            started = time.monotonic()
            if started > deadline:
                left_out = MissingRecord(subject=subject_of(cell), reason=f"not started within {minutes:g} minutes")
                lines.write(write_lines([Finding(record=left_out, environment=machine.environment())]))
                continue
            plan = BenchPlan(
                kernels=(cell.kernel,),
                providers=None if cell.kernel != "flce" else FLCE_PROVIDERS if cell.checked else FLCE_OVERVIEW,
                shapes=cell.shape,
                repetitions=Repetitions(seconds=cell.seconds, settle_seconds=cell.settle_seconds),
                errors=cell.checked,
                host=cell.checked and cell.shape == "C",
            )
            for finding in run_bench(plan, machine, lambda _: None):
                lines.write(write_lines([finding]))
                lines.flush()
            print(f"{number:3d} {cell.kernel} {cell.shape}: {time.monotonic() - started:.1f} s", file=sys.stderr)


def subject_of(cell: Cell) -> Subject:
    (shape,) = find_shapes(cell.kernel, cell.shape)
    return OPERATIONS[cell.kernel].subject("all", shape, "bf16")


class Measured:
    """Records, indexed by kernel, shape, provider and direction."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.records = list(records)
        times = [record for record in self.records if isinstance(record, TimeRecord)]
        self._times = {(r.subject.kernel, r.subject.shape, r.subject.provider, r.direction): r for r in times}

    def time(self, kernel: str, shape: str, provider: str, direction: Direction = Direction.FULL) -> TimeRecord | None:
        return self._times.get((kernel, shape, provider, direction))


@dataclasses.dataclass(frozen=True)
class Goal:
    """One goal; `measured` is None without a record."""

    name: str
    measured: float | None
    wanted: float
    at_most: bool = False

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not measured"
        return "met" if (self.measured <= self.wanted if self.at_most else self.measured >= self.wanted) else "MISSED"


def goals(measured: Measured) -> Iterator[Goal]:
    yield from flce_goals(measured)
    yield from error_goals(measured)
    waits = [r.synchronizations for r in measured.records if isinstance(r, HostRecord) and is_ours(r)]
    yield Goal("host synchronizations, all kernels of ours", max(waits, default=None), 0, at_most=True)
    for kernel in (*ELEMENTWISE, "ce"):
        yield from elementwise_goals(measured, kernel)
    rope = "rope backward, SDPA's layout: times liger's speed"
    yield Goal(rope, speed(measured, "rope", "liger", Direction.BACKWARD), 1.5)


def flce_goals(measured: Measured) -> Iterator[Goal]:
    speeds = {"A": 1.4, "B": 1.0, "C": 1.0}
    for shape, balanced, large in (("A", 0.87, 0.93), ("B", 0.87, 0.93), ("C", 0.91, 0.96)):
        ours = measured.time("flce", shape, BALANCED)
        yield Goal(f"flce {shape} balanced: share of floor", ours.floor_share if ours else None, balanced)
        held = ours.extra_peak_bytes if ours else None
        workspace = None if held is None else (held - gradient_bytes(shape)) / 2**20
        yield Goal(f"flce {shape} balanced: MiB beyond gradients", workspace, WORKSPACE_MIB, at_most=True)
        shares = [record.floor_share for name in LARGE if (record := measured.time("flce", shape, name))]
        best = max((share for share in shares if share is not None), default=None)
        yield Goal(f"flce {shape} {' or '.join(LARGE)}: share of floor", best, large)
        lean, liger = measured.time("flce", shape, LEAN), measured.time("flce", shape, "liger")
        yield Goal(f"flce {shape} lean: bytes over liger's", bytes_over(lean, liger), 1.0, at_most=True)
        faster = liger.median_seconds / lean.median_seconds if lean and liger else None
        yield Goal(f"flce {shape} lean: times liger's speed", faster, speeds[shape])


def bytes_over(ours: TimeRecord | None, theirs: TimeRecord | None) -> float | None:
    if ours is None or theirs is None or ours.extra_peak_bytes is None or not theirs.extra_peak_bytes:
        return None
    return ours.extra_peak_bytes / theirs.extra_peak_bytes


def gradient_bytes(name: str) -> int:
    (shape,) = find_shapes("flce", name)
    return (shape.tokens + shape.vocab) * shape.hidden * 2


def error_goals(measured: Measured) -> Iterator[Goal]:
    errors = [r for r in measured.records if isinstance(r, ErrorRecord) and r.subject.kernel == "flce"]
    liger = {(r.subject.shape, r.regime, r.tensor): r.error for r in errors if r.subject.provider == "liger"}
    for provider in (BALANCED, LEAN, *LARGE, *EXACT):
        own = [r for r in errors if r.subject.provider == provider]
        for tensor in ("d_hidden", "d_weight"):
            ratios = [r.ratio for r in own if r.tensor == tensor and r.ratio is not None]
            exact = tensor == "d_hidden" or provider in EXACT
            if exact:
                yield Goal(
                    f"{provider}: worst {tensor} error over eager's", max(ratios, default=None), 1.1, at_most=True
                )
                continue
            several = [r for r in own if r.tensor == tensor and (r.chunks or 0) > 1]
            single = [r.ratio for r in own if r.tensor == tensor and r.chunks == 1 and r.ratio is not None]
            over = [r.error / base for r in several if (base := liger.get((r.subject.shape, r.regime, tensor)))]
            if single:
                yield Goal(f"{provider}: worst {tensor} error over eager's, one chunk", max(single), 1.1, at_most=True)
            if several:
                yield Goal(f"{provider}: worst {tensor} error over liger's", max(over, default=None), 1.0, at_most=True)


def elementwise_goals(measured: Measured, kernel: str) -> Iterator[Goal]:
    # the loss makes its gradient in forward: only both passes together compare
    directions = (Direction.FULL,) if kernel == "ce" else (Direction.FORWARD, Direction.BACKWARD)
    for direction in directions:
        ours = measured.time(kernel, "C", BALANCED, direction)
        name = f"{kernel} {direction.value}"
        yield Goal(f"{name}: share of a copy of as many bytes", ours.floor_share if ours else None, 0.85)
        yield Goal(f"{name}: share of a 1 GiB copy's rate", ours.copy_rate_share if ours else None, 0.85)
        faster = direction is Direction.BACKWARD and kernel in ("rms", "swiglu")
        for peer in ("liger", "torch-compile"):
            wanted = 1.0 if faster and peer == "liger" else 1 / SLACK
            yield Goal(f"{name}: times {peer}'s speed", speed(measured, kernel, peer, direction), wanted)


def speed(measured: Measured, kernel: str, peer: str, direction: Direction) -> float | None:
    """How many times faster than a peer ours is."""
    ours, theirs = (measured.time(kernel, "C", provider, direction) for provider in (BALANCED, peer))
    return theirs.median_seconds / ours.median_seconds if ours and theirs else None


def is_ours(record: Record) -> bool:
    return record.subject.provider.partition(":")[0] == BALANCED


def print_goals(results: Path) -> None:
    records = [finding.record for finding in join_findings(read_lines(results))]
    for goal in goals(Measured(records)):
        number = "-" if goal.measured is None else f"{goal.measured:.4g}"
        sign = "<=" if goal.at_most else ">="
        print(f"{goal.verdict:12s} {goal.name:68s} {number:>10s} {sign} {goal.wanted:.4g}")
    ours = [r for r in records if isinstance(r, MissingRecord) and (is_ours(r) or r.subject.provider == "all")]
    for record in ours:
        subject = record.subject
        print(f"MISSING      {subject.kernel} {subject.shape} {subject.provider}: {record.reason}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "goals"))
    parser.add_argument("results", type=Path)
    parser.add_argument("--sections", default=",".join(SECTIONS), help="of study, paper, llama, joined by commas")
    parser.add_argument("--kernels", default="", help="these alone, joined by commas")
    parser.add_argument("--minutes", type=float, default=9.0, help="start no cell after this time")
    arguments = parser.parse_args()
    if arguments.what == "measure":
        cells = [cell for section in arguments.sections.split(",") for cell in SECTIONS[section]]
        kernels = arguments.kernels.split(",") if arguments.kernels else [cell.kernel for cell in cells]
        measure(arguments.results, [cell for cell in cells if cell.kernel in kernels], arguments.minutes)
    print_goals(arguments.results)


if __name__ == "__main__":
    main()
