"""Measure the overhead of ligerprof.record() on a training step on a GPU: off, with Python stacks, with C++ stacks too.

    python benchmarks/record_overhead.py benchmarks/results/record-overhead-h200.jsonl

The three alternate, so that a drifting clock affects all alike. One JSON line is appended.
"""

import argparse
import json
import statistics
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

import ligerprof
from ligerprof import TrainingRecipe
from ligerprof.runs.training import built_model, make_batch, make_optimizer

MODES = ("off", "python", "all")


def train(model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
    """A step as a user writes it."""
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(**batch, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def recording(mode: str, folder: str, model: Any) -> AbstractContextManager[Any]:
    return nullcontext() if mode == "off" else ligerprof.record(folder, model=model, stacks=mode, force=True)


def timed(train_once: Any, steps: int) -> list[float]:
    seconds = []
    for _ in range(steps + 2):
        torch.cuda.synchronize()
        started = time.perf_counter()
        train_once()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    # the first warms up: modules are hooked, frames looked up for the first time
    return seconds[1:]


def measure(recipe: TrainingRecipe, *, rounds: int, steps: int) -> dict[str, Any]:
    device = torch.device("cuda", torch.cuda.current_device())
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    # the recorder notes what the nodes of the first two steps have saved
    noted: dict[str, list[float]] = {mode: [] for mode in MODES}
    written: dict[str, list[float]] = {mode: [] for mode in MODES}
    sizes: dict[str, int] = {}
    with built_model(recipe, device) as model, tempfile.TemporaryDirectory() as folder:
        optimizer, batch = make_optimizer(recipe, model), make_batch(recipe, device)
        for _ in range(3):
            train(model, optimizer, batch)
        for _ in range(rounds):
            for mode in MODES:
                with recording(mode, folder, model):
                    second, *others = timed(lambda: train(model, optimizer, batch), steps)
                    noted[mode].append(second)
                    seconds[mode] += others
                    ended = time.perf_counter()
                written[mode].append(time.perf_counter() - ended)
                if mode != "off":
                    sizes[mode] = (Path(folder) / "snapshot.pickle").stat().st_size
    off = statistics.median(seconds["off"])
    return {
        "schema": 1,
        "kind": "record_overhead",
        "gpu": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "recipe": {"model": recipe.model, "batch": recipe.batch, "seq": recipe.seq, "liger": recipe.liger},
        "rounds": rounds,
        "steps": steps,
        "step_seconds": {mode: statistics.median(seconds[mode]) for mode in MODES},
        "second_step_seconds": {mode: statistics.median(noted[mode]) for mode in MODES},
        "fastest_seconds": {mode: min(seconds[mode]) for mode in MODES},
        "overhead_ratio": {mode: statistics.median(seconds[mode]) / off - 1 for mode in MODES},
        "write_seconds": {mode: statistics.median(written[mode]) for mode in MODES if mode != "off"},
        "snapshot_bytes": sizes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--model", default="llama3.2-1b")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--liger", default="none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    recipe = TrainingRecipe(model=arguments.model, batch=arguments.batch, seq=arguments.seq, liger=arguments.liger)
    result = measure(recipe, rounds=arguments.rounds, steps=arguments.steps)
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    with arguments.results.open("a") as lines:
        lines.write(json.dumps(result) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
