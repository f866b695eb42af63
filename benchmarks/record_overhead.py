"""Measure what each part of a recording costs per training step, in one process.

    python benchmarks/record_overhead.py benchmarks/results/record-overhead-h200.jsonl --seconds 60
    python benchmarks/record_overhead.py results.jsonl --batch 1 --seq 64 --layers 4 --pin --steps 6

The modes take turns in short blocks of steps, in a new order each round, so that a drifting clock and other programs
on the host affect all alike. `history-*` is torch's own history without ligerprof; `oom` is what LIGERPROF=oom
switches on, `outside` what runs between the first and the chosen steps, and `after` what runs after these. `off-again`
is a second `off`. `hooks` and `stamps` are the recorder's hooks without a history: stamps go nowhere or to torch;
`phases` are those without modules, and `events` is a history without stacks and hooks. `all-nodes` has a hook at each
autograd node, as `stacks="python"` has. `record-*` is `ligerprof.record`.

The detailed steps, the first two, are not timed. `over_off` is the median of the rounds, each mode's block over the
mean of both `off` in the same round, with its 95 % interval (bootstrap); `oom_over_history` compares in the same way.
`cpu` compares the processor time of all threads instead of the time that passed: in a step that waits for Python, it is
what other programs on the host change least. One JSON line is appended.

`--layers 4 --batch 1 --seq 64` is a step that waits for Python. `--device cpu` times the hooks alone on small layers.
"""

import argparse
import datetime as dt
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ligerprof
from ligerprof import TrainingRecipe
from ligerprof.runs.recording.out_of_memory import OutOfMemoryWatch
from ligerprof.runs.recording.phases import LoopPhases
from ligerprof.runs.recording.process import ProcessRecording
from ligerprof.runs.recording.record import CudaHistory, Recorder
from ligerprof.runs.recording.saved import SavedTensors, locate_on_cuda, unix_time_us
from ligerprof.runs.recording.settings import Mode, Settings, Steps
from ligerprof.runs.training import built_model, make_batch, make_optimizer

MAX_ENTRIES = 1_000_000
# steps of a block before the timed ones: the first two are recorded in detail, and one switches
UNTIMED = 3
FEWEST_ROUNDS, RESAMPLED = 5, 2000
Way = Callable[[nn.Module, str], AbstractContextManager[Any]]


@contextmanager
def history(_model: nn.Module, _folder: str, *, stacks: str, context: str | None) -> Iterator[None]:
    """Torch's history of the caching allocator, nothing of ours."""
    memory: Any = torch.cuda.memory
    memory._record_memory_history(max_entries=MAX_ENTRIES, stacks=stacks, context=context)
    try:
        yield
    finally:
        memory._record_memory_history(enabled=None)


@contextmanager
def hooks(model: nn.Module, _folder: str, *, stamps: bool, names_all_nodes: bool = False) -> Iterator[None]:
    """The recorder's hooks without a history; stamps go to torch or nowhere."""
    memory: Any = torch.cuda.memory
    saved = SavedTensors(locate=locate_on_cuda, clock=unix_time_us)
    emit = CudaHistory().stamp if stamps else lambda _text: None
    phases = LoopPhases(emit, saved, names_all_nodes=names_all_nodes)
    phases.open()
    phases.attach(model)
    try:
        yield
    finally:
        phases.close()
        if stamps:
            memory._set_memory_metadata("")


@contextmanager
def phases_only(_model: nn.Module, _folder: str) -> Iterator[None]:
    """The hooks of steps in front of the chosen ones, without a history."""
    phases = LoopPhases(lambda _text: None)
    phases.open(modules=False)
    try:
        yield
    finally:
        phases.close()


@contextmanager
def outside(_model: nn.Module, folder: str) -> Iterator[None]:
    """Steps in front of the chosen ones."""
    history = CudaHistory()
    recorder = Recorder(folder, history=history, force=True, first_step=1_000_000).open()
    try:
        yield
    finally:
        # nothing is written, which would take longer than the steps
        recorder.abandon()
        history.stop()


@contextmanager
def after(_model: nn.Module, folder: str) -> Iterator[None]:
    """Steps after the chosen one of `run`: the first is recorded, the second writes the recording."""
    output = Path(tempfile.mkdtemp(dir=folder))
    recording = ProcessRecording(Settings(mode=Mode.RUN, output=output, steps=Steps(first=1, last=1)))
    recording.start()
    try:
        yield
    finally:
        recording.finish()


@contextmanager
def oom(_model: nn.Module, _folder: str) -> Iterator[None]:
    """What LIGERPROF=oom switches on."""
    history = CudaHistory()
    OutOfMemoryWatch(Settings(mode=Mode.OUT_OF_MEMORY), history).start()
    try:
        yield
    finally:
        history.stop()


def record(model: nn.Module, folder: str, *, stacks: Any) -> AbstractContextManager[Any]:
    """ligerprof.record()."""
    return ligerprof.record(folder, model=model, stacks=stacks, force=True)


MODES: Mapping[str, Way] = {
    "off": lambda _model, _folder: nullcontext(),
    "off-again": lambda _model, _folder: nullcontext(),
    "history-python": partial(history, stacks="python", context="alloc"),
    "history-all": partial(history, stacks="all", context="alloc"),
    "history-default": partial(history, stacks="all", context="all"),
    "oom": oom,
    "outside": outside,
    "after": after,
    "events": partial(history, stacks="all", context=None),
    "phases": phases_only,
    "hooks": partial(hooks, stamps=False),
    "stamps": partial(hooks, stamps=True),
    "all-nodes": partial(hooks, stamps=True, names_all_nodes=True),
    "record-python": partial(record, stacks="python"),
    "record-all": partial(record, stacks="all"),
}


def train(model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
    """A step as a user writes it."""
    with torch.autocast(batch["input_ids"].device.type, torch.bfloat16):
        loss = model(**batch, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Seconds of a step in one block: time that passed, and processor time of all threads."""

    wall: float
    cpu: float


def timed(train_once: Callable[[], None], steps: int, synchronize: Callable[[], None]) -> Block:
    """The mean step of a block, after the first two steps."""
    for _ in range(UNTIMED):
        train_once()
    synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        train_once()
    synchronize()
    return Block(wall=(time.perf_counter() - wall) / steps, cpu=(time.process_time() - cpu) / steps)


def keep_layers(model: Any, layers: int) -> None:
    """Drop all but the first decoder layers."""
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers


def pin() -> int:
    """Keep this process on the processor that counts fastest; returns its number."""

    def seconds(core: int) -> float:
        os.sched_setaffinity(0, {core})
        begin = time.perf_counter()
        sum(range(300_000))
        return time.perf_counter() - begin

    cores = sorted(os.sched_getaffinity(0))
    fastest = min(cores, key=lambda core: min(seconds(core) for _ in range(3)))
    os.sched_setaffinity(0, {fastest})
    return fastest


def measure(recipe: TrainingRecipe, modes: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one recipe."""
    on_cuda = options.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    synchronize: Callable[[], None] = torch.cuda.synchronize if on_cuda else lambda: None
    core = pin() if options.pin else None
    rounds: list[dict[str, Block]] = []
    order = random.Random(0)
    with built_model(recipe, device) as model, tempfile.TemporaryDirectory() as folder:
        if options.layers:
            keep_layers(model, options.layers)
        optimizer, batch = make_optimizer(recipe, model), make_batch(recipe, device)
        for _ in range(3):
            train(model, optimizer, batch)
        begin = time.perf_counter()
        while time.perf_counter() - begin < options.seconds or len(rounds) < FEWEST_ROUNDS:
            blocks: dict[str, Block] = {}
            for mode in order.sample(modes, len(modes)):
                with MODES[mode](model, folder):
                    blocks[mode] = timed(lambda: train(model, optimizer, batch), options.steps, synchronize)
            rounds.append(blocks)
            # a run that is cut short keeps its rounds
            print(json.dumps({mode: round(block.wall * 1e3, 3) for mode, block in blocks.items()}), flush=True)
        modules = sum(1 for _ in model.modules())
    both = "oom" in modes and "history-python" in modes

    def over_off(clock: str) -> dict[str, Any]:
        base = [(getattr(each["off"], clock) + getattr(each["off-again"], clock)) / 2 for each in rounds]
        return {mode: spread([getattr(each[mode], clock) for each in rounds], base) for mode in modes}

    def over_history(clock: str) -> dict[str, float]:
        columns = [[getattr(each[mode], clock) for each in rounds] for mode in ("oom", "history-python")]
        return spread(*columns)

    return {
        "schema": 5,
        "kind": "record_overhead",
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
        "commit": options.commit,
        "gpu": torch.cuda.get_device_name(device) if on_cuda else None,
        "torch": torch.__version__,
        "recipe": {"model": recipe.model, "batch": recipe.batch, "seq": recipe.seq, "liger": recipe.liger},
        "layers": options.layers,
        "core": core,
        "modules": modules,
        "rounds": len(rounds),
        "steps": options.steps,
        "step_ms": {mode: round(statistics.median(each[mode].wall for each in rounds) * 1e3, 3) for mode in modes},
        "cpu_ms": {mode: round(statistics.median(each[mode].cpu for each in rounds) * 1e3, 3) for mode in modes},
        "over_off": over_off("wall"),
        "oom_over_history": over_history("wall") if both else None,
        "cpu": {"over_off": over_off("cpu"), "oom_over_history": over_history("cpu") if both else None},
    }


def spread(values: list[float], base: list[float]) -> dict[str, float]:
    """Ratios less 1, round by round: their median, and the borders of its 95 % interval."""
    ratios = [value / each - 1 for value, each in zip(values, base, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLED))
    return {
        "median": round(statistics.median(ratios), 4),
        "low": round(medians[RESAMPLED * 25 // 1000], 4),
        "high": round(medians[-1 - RESAMPLED * 25 // 1000], 4),
    }


def main() -> None:
    """Measure one recipe and append a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--model", default="llama3.2-1b")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--liger", default="none")
    parser.add_argument("--layers", type=int, help="Keep only the first layers.")
    parser.add_argument("--seconds", type=float, default=60, help="Rounds begin until then.")
    parser.add_argument("--steps", type=int, default=4, help="Timed steps of a block, after two others.")
    parser.add_argument("--pin", action="store_true", help="Keep the process on one core.")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--commit", help="What is measured, to be written into the line.")
    others = [mode for mode in MODES if "off" not in mode]
    parser.add_argument("--modes", nargs="+", choices=others, help="Default: all.")
    options = parser.parse_args()
    recipe = TrainingRecipe(model=options.model, batch=options.batch, seq=options.seq, liger=options.liger)
    result = measure(recipe, ["off", "off-again", *(options.modes or others)], options)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with options.results.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(result) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
