"""Measure what each part of a recording costs per training step on a GPU.

    python benchmarks/record_overhead.py benchmarks/results/record-overhead-h200.jsonl

The modes take turns in one process, so that a drifting clock affects all alike. `history-*` is torch's own history
without ligerprof; `oom` is what LIGERPROF=oom switches on, `outside` what runs between the first and the chosen steps,
and `after` what runs after these. `off-again` is a second `off`: how far it is off is what the benchmark cannot tell.
`hooks` and `stamps` are the recorder's hooks without a history: stamps go nowhere or to torch. `all-nodes` has a
hook at each autograd node, as `stacks="python"` has. `record-*` is `ligerprof.record`. The detailed steps, the first
two, are not among the steps that are counted. `over_off` is the median of the rounds, each mode's median step over that
of both `off` in the same round, with the lowest and the highest; so is `oom_over_history`. One JSON line is appended.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from ligerprof.runs.recording.record import CudaHistory, Recorder, running
from ligerprof.runs.recording.saved import SavedTensors, locate_on_cuda, unix_time_us
from ligerprof.runs.recording.settings import Mode, Settings, Steps
from ligerprof.runs.training import built_model, make_batch, make_optimizer

MAX_ENTRIES = 1_000_000
Way = Callable[[nn.Module, str], AbstractContextManager[Any]]


@contextmanager
def history(_model: nn.Module, _folder: str, *, stacks: str, context: str) -> Iterator[None]:
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
        memory._set_memory_metadata("")


@contextmanager
def outside(_model: nn.Module, folder: str) -> Iterator[None]:
    """Steps in front of the chosen ones: phases without modules, and events without stacks."""
    recorder = Recorder(folder, history=CudaHistory(), force=True, first_step=1_000_000)
    with running(recorder):
        yield


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
    "hooks": partial(hooks, stamps=False),
    "stamps": partial(hooks, stamps=True),
    "all-nodes": partial(hooks, stamps=True, names_all_nodes=True),
    "record-python": partial(record, stacks="python"),
    "record-all": partial(record, stacks="all"),
}


def train(model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
    """A step as a user writes it."""
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(**batch, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def timed(train_once: Callable[[], None], steps: int) -> list[float]:
    """Seconds of each step but the first, in which frames are looked up for the first time."""
    seconds = []
    for _ in range(steps + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        train_once()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return seconds[1:]


def measure(recipe: TrainingRecipe, modes: list[str], *, rounds: int, steps: int) -> dict[str, Any]:
    """The figures of one recipe."""
    device = torch.device("cuda", torch.cuda.current_device())
    # the first two steps are recorded in detail
    second: dict[str, list[float]] = {mode: [] for mode in modes}
    later: dict[str, list[float]] = {mode: [] for mode in modes}
    closing: dict[str, list[float]] = {mode: [] for mode in modes}
    rounds_of: dict[str, list[float]] = {mode: [] for mode in modes}
    order = random.Random(0)
    with built_model(recipe, device) as model, tempfile.TemporaryDirectory() as folder:
        optimizer, batch = make_optimizer(recipe, model), make_batch(recipe, device)
        for _ in range(3):
            train(model, optimizer, batch)
        for _ in range(rounds):
            for mode in order.sample(modes, len(modes)):
                with MODES[mode](model, folder):
                    second_step, *others = timed(lambda: train(model, optimizer, batch), steps + 1)
                    second[mode].append(second_step)
                    later[mode] += others
                    rounds_of[mode].append(statistics.median(others))
                    ended = time.perf_counter()
                closing[mode].append(time.perf_counter() - ended)
            # a run that is cut short keeps its rounds
            print(json.dumps({mode: values[-1] for mode, values in rounds_of.items()}), flush=True)
        modules = sum(1 for _ in model.modules())
    off = statistics.median(later["off"])
    base = [statistics.mean(pair) for pair in zip(rounds_of["off"], rounds_of["off-again"], strict=True)]
    over_off = {mode: spread(values, base) for mode, values in rounds_of.items()}
    both = "oom" in modes and "history-python" in modes
    return {
        "schema": 4,
        "kind": "record_overhead",
        "gpu": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "recipe": {"model": recipe.model, "batch": recipe.batch, "seq": recipe.seq, "liger": recipe.liger},
        "modules": modules,
        "rounds": rounds,
        "steps": steps,
        "step_seconds": {mode: statistics.median(later[mode]) for mode in modes},
        "second_step_seconds": {mode: statistics.median(second[mode]) for mode in modes},
        "fastest_seconds": {mode: min(later[mode]) for mode in modes},
        "overhead_ratio": {mode: round(statistics.median(later[mode]) / off - 1, 4) for mode in modes},
        "over_off": over_off,
        "oom_over_history": spread(rounds_of["oom"], rounds_of["history-python"]) if both else None,
        "closing_seconds": {mode: statistics.median(closing[mode]) for mode in modes},
    }


def spread(values: list[float], base: list[float]) -> dict[str, float]:
    """Ratios less 1, round by round: their median, lowest and highest."""
    ratios = [value / each - 1 for value, each in zip(values, base, strict=True)]
    return {
        name: round(function(ratios), 4)
        for name, function in (("median", statistics.median), ("lowest", min), ("highest", max))
    }


def main() -> None:
    """Measure one recipe and append a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--model", default="llama3.2-1b")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--liger", default="none")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5, help="Timed steps of a mode and round, after the second step.")
    parser.add_argument(
        "--modes", nargs="+", choices=[mode for mode in MODES if "off" not in mode], help="Default: all."
    )
    options = parser.parse_args()
    recipe = TrainingRecipe(model=options.model, batch=options.batch, seq=options.seq, liger=options.liger)
    modes = ["off", "off-again", *(options.modes or [mode for mode in MODES if "off" not in mode])]
    result = measure(recipe, modes, rounds=options.rounds, steps=options.steps)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with options.results.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(result) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
