"""Measure what each part of a recording costs per training step, in one process.

    python benchmarks/record_overhead.py benchmarks/results/record-overhead-h200.jsonl --seconds 60
    python benchmarks/record_overhead.py results.jsonl --batch 1 --seq 64 --layers 4 --pin --steps 6

The modes take turns (recording_turns.py). `history-*` is torch's own history without ligerprof; `oom` is what
LIGERPROF=oom switches on. Of `run --steps`, `outside` is what runs between the first and the chosen steps, `inside`
what runs in the chosen ones, and `after` what runs after them. `off-again` is a second `off`. `hooks` and `stamps` are
the recorder's hooks without a history: stamps go nowhere or to torch; `phases` are those without modules, and `events`
is a history without stacks and hooks. `all-nodes` has a hook at each node, as `stacks="python"` has. `record-*`
is `ligerprof.record`.

The detailed steps, the first two, are not timed. `over_off` is the median of the rounds, the median step of each mode's
block over the mean of both `off` in the same round, with its 95 % interval (bootstrap); `oom_over_history` compares in
the same way. `cpu` compares the processor time of all threads instead of the time that passed: in a step that waits for
Python, it is what other programs on the host change least. One JSON line is appended.

`--layers 4 --batch 1 --seq 64` is a step that waits for Python. `--device cpu` times the hooks alone on small layers.
"""

import argparse
import datetime as dt
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from recording_turns import OFF, WAYS, Round, over_each_other, over_off, pin, turns

from ligerprof import TrainingRecipe
from ligerprof.runs.training import built_model, make_batch, make_optimizer


def train(model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
    """A step as a user writes it."""
    with torch.autocast(batch["input_ids"].device.type, torch.bfloat16):
        loss = model(**batch, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def keep_layers(model: Any, layers: int) -> None:
    """Drop all but the first decoder layers."""
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers


def measure(recipe: TrainingRecipe, modes: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one recipe."""
    on_cuda = options.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    synchronize: Callable[[], None] = torch.cuda.synchronize if on_cuda else lambda: None
    core = pin()[0] if options.pin else None
    rounds: list[Round] = []
    with built_model(recipe, device) as model:
        if options.layers:
            keep_layers(model, options.layers)
        optimizer, batch = make_optimizer(recipe, model), make_batch(recipe, device)
        for _ in range(3):
            train(model, optimizer, batch)
        others = [mode for mode in modes if mode not in OFF]
        timed = {"seconds": options.seconds, "steps": options.steps, "synchronize": synchronize}
        for _ in turns(others, rounds, model=model, **timed):
            train(model, optimizer, batch)
        modules = sum(1 for _ in model.modules())

    def milliseconds(mode: str, clock: str) -> float:
        return round(statistics.median(getattr(each[mode], clock) for each in rounds if mode in each) * 1e3, 3)

    def over_history(clock: str) -> dict[str, float] | None:
        both = "oom" in modes and "history-python" in modes
        return over_each_other(rounds, clock, "oom", "history-python") if both else None

    return {
        "schema": 6,
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
        "step_ms": {mode: milliseconds(mode, "wall") for mode in modes},
        "cpu_ms": {mode: milliseconds(mode, "cpu") for mode in modes},
        "over_off": over_off(rounds, "wall"),
        "oom_over_history": over_history("wall"),
        "cpu": {"over_off": over_off(rounds, "cpu"), "oom_over_history": over_history("cpu")},
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
    others = [mode for mode in WAYS if mode not in OFF]
    parser.add_argument("--modes", nargs="+", choices=others, help="Default: all.")
    options = parser.parse_args()
    recipe = TrainingRecipe(model=options.model, batch=options.batch, seq=options.seq, liger=options.liger)
    result = measure(recipe, [*OFF, *(options.modes or others)], options)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with options.results.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(result) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
