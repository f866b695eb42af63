"""Ways to record a training step, in turns within one process: record_overhead.py and script_overhead.py use them.

The ways take turns in short blocks of steps, in a new order each round, so that a drifting clock and other programs on
the host affect all alike. A round has two blocks without a recording (`off`, `off-again`); each other block of it is
compared with the mean of both. How far `off` is from that mean is what a round cannot distinguish. Each step begins and
ends with a synchronization, and the median step of a block counts.
"""

import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ligerprof
from ligerprof.runs.recording.out_of_memory import OutOfMemoryWatch
from ligerprof.runs.recording.phases import LoopPhases
from ligerprof.runs.recording.process import ProcessRecording
from ligerprof.runs.recording.record import CudaHistory
from ligerprof.runs.recording.saved import SavedTensors, locate_on_cuda, unix_time_us
from ligerprof.runs.recording.settings import Mode, Settings, Steps

MAX_ENTRIES = 1_000_000
# steps of a block before the timed ones: the first two are recorded in detail, and one switches
UNTIMED = 3
FEWEST_ROUNDS, RESAMPLED = 5, 2000
OFF = ("off", "off-again")
# what is far above any noise runs in one of three rounds
RARE, RARITY = ("inside",), 3
Way = Callable[[nn.Module | None, str], AbstractContextManager[Any]]


@contextmanager
def history(_model: nn.Module | None, _folder: str, *, stacks: str, context: str | None) -> Iterator[None]:
    """Torch's history of the caching allocator, nothing of ours."""
    memory: Any = torch.cuda.memory
    memory._record_memory_history(max_entries=MAX_ENTRIES, stacks=stacks, context=context)
    try:
        yield
    finally:
        memory._record_memory_history(enabled=None)


@contextmanager
def hooks(model: nn.Module | None, _folder: str, *, stamps: bool, names_all_nodes: bool = False) -> Iterator[None]:
    """The recorder's hooks without a history; stamps go to torch or nowhere."""
    memory: Any = torch.cuda.memory
    saved = SavedTensors(locate=locate_on_cuda, clock=unix_time_us)
    emit = CudaHistory().stamp if stamps else lambda _text: None
    phases = LoopPhases(emit, saved, names_all_nodes=names_all_nodes)
    phases.open()
    if model is not None:
        phases.attach(model)
    try:
        yield
    finally:
        phases.close()
        if stamps:
            memory._set_memory_metadata("")


@contextmanager
def phases_only(_model: nn.Module | None, _folder: str) -> Iterator[None]:
    """The hooks of steps in front of the chosen ones, without a history."""
    phases = LoopPhases(lambda _text: None)
    phases.open(modules=False)
    phases.stamp(enabled=False)
    try:
        yield
    finally:
        phases.close()


@contextmanager
def process(_model: nn.Module | None, folder: str, *, steps: Steps, writes: bool = False) -> Iterator[None]:
    """What `run --steps` does in a process.

    Args:
        writes: whether the recording is written, as after the chosen steps; it takes longer than the steps.
    """
    exits = vars(os)
    leave, history = exits["_exit"], CudaHistory()
    output = Path(tempfile.mkdtemp(dir=folder))
    recording = ProcessRecording(Settings(mode=Mode.RUN, output=output, steps=steps), history)
    recording.start()
    try:
        yield
    finally:
        if writes:
            recording.finish()
        else:
            recording._leave()
            history.release()
            history.stop()
        exits["_exit"] = leave


@contextmanager
def oom(_model: nn.Module | None, _folder: str) -> Iterator[None]:
    """What LIGERPROF=oom switches on."""
    history = CudaHistory()
    OutOfMemoryWatch(Settings(mode=Mode.OUT_OF_MEMORY), history).start()
    try:
        yield
    finally:
        history.stop()


def record(model: nn.Module | None, folder: str, *, stacks: Any) -> AbstractContextManager[Any]:
    """ligerprof.record()."""
    return ligerprof.record(folder, model=model, stacks=stacks, force=True)


WAYS: Mapping[str, Way] = {
    **dict.fromkeys(OFF, lambda _model, _folder: nullcontext()),
    "history-python": partial(history, stacks="python", context="alloc"),
    "history-all": partial(history, stacks="all", context="alloc"),
    "history-default": partial(history, stacks="all", context="all"),
    "oom": oom,
    "outside": partial(process, steps=Steps(first=1_000_000)),
    "inside": partial(process, steps=Steps()),
    # the first step is recorded, the second writes the recording
    "after": partial(process, steps=Steps(first=1, last=1), writes=True),
    "events": partial(history, stacks="all", context=None),
    "phases": phases_only,
    "hooks": partial(hooks, stamps=False),
    "stamps": partial(hooks, stamps=True),
    "all-nodes": partial(hooks, stamps=True, names_all_nodes=True),
    "record-python": partial(record, stacks="python"),
    "record-all": partial(record, stacks="all"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Seconds of a step in one block: the median of the time that passed, the mean processor time of all threads."""

    wall: float
    cpu: float


Round = dict[str, Block]


def turns(
    ways: Sequence[str],
    rounds: list[Round],
    *,
    seconds: float,
    steps: int,
    synchronize: Callable[[], None],
    model: nn.Module | None = None,
) -> Iterator[None]:
    """Yield once before each training step of the caller, and add to `rounds` how long the steps took.

    Args:
        ways: names of `WAYS`, without those of `OFF`.
        seconds: rounds begin until then.
        steps: timed steps of a block.
        model: its modules are named from the start; None: those that run.
    """
    order, begin = random.Random(0), time.perf_counter()
    # what exists before is left out of Python's collector, whose walks over it would take longer than many steps
    gc.collect()
    gc.freeze()
    with tempfile.TemporaryDirectory() as folder:
        while time.perf_counter() - begin < seconds or len(rounds) < FEWEST_ROUNDS:
            names = [*OFF, *(name for name in ways if name not in RARE or len(rounds) % RARITY == 0)]
            blocks: Round = {}
            for name in order.sample(names, len(names)):
                with WAYS[name](model, folder):
                    for _ in range(UNTIMED):
                        yield
                    gc.collect()
                    synchronize()
                    passed, cpu = [], time.process_time()
                    for _ in range(steps):
                        wall = time.perf_counter()
                        yield
                        synchronize()
                        passed.append(time.perf_counter() - wall)
                    used = time.process_time() - cpu
                blocks[name] = Block(wall=statistics.median(passed), cpu=used / steps)
            rounds.append(blocks)
            # a run that is cut short keeps its rounds
            print(json.dumps({name: round(block.wall * 1e3, 3) for name, block in blocks.items()}), file=sys.stderr)


def pin(count: int = 1) -> list[int]:
    """Keep the threads of this process on the processors that count fastest; returns their numbers."""
    mine = os.sched_getaffinity(0)

    def seconds(core: int) -> float:
        os.sched_setaffinity(0, {core})
        begin = time.perf_counter()
        sum(range(300_000))
        return time.perf_counter() - begin

    fastest = sorted(mine, key=lambda core: min(seconds(core) for _ in range(3)))[:count]
    os.sched_setaffinity(0, mine)
    keep_on(fastest)
    return fastest


def keep_on(cores: Sequence[int]) -> None:
    """Keep all threads of this process on processors."""
    for thread in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(thread.name), set(cores))
        except ProcessLookupError:
            # it has ended
            continue


def over_off(rounds: Sequence[Round], clock: str) -> dict[str, dict[str, float]]:
    """Each way's ratio to the mean of both `OFF` of a round, by `wall` or `cpu`."""

    def against(name: str) -> dict[str, float]:
        chosen = [each for each in rounds if name in each]
        base = [statistics.mean(getattr(each[off], clock) for off in OFF) for each in chosen]
        return spread([getattr(each[name], clock) for each in chosen], base)

    return {name: against(name) for name in rounds[0]}


def over_each_other(rounds: Sequence[Round], clock: str, way: str, other: str) -> dict[str, float]:
    """One way's ratio to another."""
    first, second = ([getattr(each[name], clock) for each in rounds] for name in (way, other))
    return spread(first, second)


def spread(values: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """Ratios less 1, round by round: their median, and the borders of its 95 % interval."""
    ratios = [value / each - 1 for value, each in zip(values, base, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLED))
    return {
        "median": round(statistics.median(ratios), 4),
        "low": round(medians[RESAMPLED * 25 // 1000], 4),
        "high": round(medians[-1 - RESAMPLED * 25 // 1000], 4),
    }
