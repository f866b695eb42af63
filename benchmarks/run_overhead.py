"""Measure what `ligerprof run` and LIGERPROF=oom cost per step of a host-bound training, in turns of whole processes.

    python benchmarks/run_overhead.py results/run-overhead-h200.json --turns 5

Each process is forked from one that has imported torch but not used the device, and trains the same small model. It
times its own steps, each between two synchronizations. The ways to run it:

- `alone`, twice in each turn: their difference is what the benchmark cannot tell;
- `run`: as `ligerprof run --steps 40:54` records a process. Steps before, inside and after these are reported apart;
- `oom`: with LIGERPROF=oom;
- `history`: with torch's own history with Python stacks, nothing of ours.

The order within a turn is drawn anew. A way's ratio of a turn is its median step over the mean of both `alone`.
`benchmarks/record_overhead.py` compares the same parts within one process, for larger models as well.
"""

import argparse
import datetime as dt
import json
import os
import random
import statistics
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ligerprof.runs.recording.door import open_door
from ligerprof.runs.recording.settings import Mode, Settings, Steps

STEPS, WARM_UP, FIRST, LAST = 90, 15, 40, 54
WAYS = ("alone", "again", "run", "oom", "history")
MAX_ENTRIES = 300_000


class Layer(nn.Module):
    """A decoder layer of many small modules."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.output = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.activation, self.dropout = nn.GELU(), nn.Dropout(0.0)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, tokens, width] to the same."""
        normed = self.attention_norm(hidden)
        heads = [part(normed).unflatten(-1, (4, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        hidden = hidden + self.dropout(self.output(mixed.transpose(1, 2).flatten(-2)))
        return hidden + self.dropout(self.down(self.activation(self.up(self.mlp_norm(hidden)))))


def train(steps: int, device: str) -> list[float]:
    """Seconds of each step."""
    torch.manual_seed(0)
    width, vocabulary = 256, 4096
    model = nn.Sequential(nn.Embedding(vocabulary, width), *(Layer(width) for _ in range(12))).to(device)
    head = nn.Linear(width, vocabulary).to(device)
    whole = nn.Sequential(model, head)
    optimizer = torch.optim.AdamW(whole.parameters())
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    seconds = []
    for _ in range(steps):
        synchronize()
        begin = time.perf_counter()
        tokens = torch.randint(vocabulary, (4, 64), device=device)
        loss = nn.functional.cross_entropy(whole(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        synchronize()
        seconds.append(time.perf_counter() - begin)
    return seconds


def in_process(way: str, folder: Path, steps: int, device: str) -> list[float]:
    """Train in a forked process, one way."""
    results = folder / f"{way}.json"
    child = os.fork()
    if not child:
        status = 1
        try:
            settings = {
                "run": Settings(mode=Mode.RUN, output=folder / "recording", steps=Steps(first=FIRST, last=LAST)),
                "oom": Settings(mode=Mode.OUT_OF_MEMORY),
            }.get(way)
            if settings is not None:
                os.environ.update(settings.to_environment())
                open_door()
            if way == "history" and device == "cuda":
                memory: Any = torch.cuda.memory
                memory._record_memory_history(max_entries=MAX_ENTRIES, stacks="python", context="alloc")
            results.write_text(json.dumps(train(steps, device)), encoding="utf-8")
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            # what `run` wraps, to write the recording
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    if ended:
        raise SystemExit(f"{way}: the process failed")
    seconds: list[float] = json.loads(results.read_text(encoding="utf-8"))
    return seconds


def medians(way: str, seconds: list[float]) -> dict[str, float]:
    """Median of the steps after the warm-up; for `run`, of those before, inside and after the recorded ones."""
    if way != "run":
        return {way: statistics.median(seconds[WARM_UP:])}
    # the first step after the recording writes it, and the first recorded ones look up frames
    parts = {"before": seconds[WARM_UP : FIRST - 1], "inside": seconds[FIRST + 1 : LAST], "after": seconds[LAST + 2 :]}
    return {f"run, {name} the recorded steps": statistics.median(part) for name, part in parts.items()}


def main() -> None:
    """Take turns, and write every median and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--device", default="cuda", help="`cpu` tries the script: nothing is recorded there")
    options = parser.parse_args()
    if options.turns < 5:
        parser.error("fewer than five turns say nothing")
    order = random.Random(0)
    turns: list[dict[str, float]] = []
    for _ in range(options.turns):
        found: dict[str, float] = {}
        for way in order.sample(WAYS, len(WAYS)):
            with tempfile.TemporaryDirectory() as folder:
                found.update(medians(way, in_process(way, Path(folder), options.steps, options.device)))
                print(json.dumps(found), flush=True)
        turns.append(found)
    names = sorted(turns[0])
    ratios = {
        name: [turn[name] / statistics.mean((turn["alone"], turn["again"])) - 1 for turn in turns] for name in names
    }
    against_history = [turn["oom"] / turn["history"] - 1 for turn in turns]
    is_cuda = options.device == "cuda"
    result = {
        "schema": 1,
        "kind": "run_overhead",
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
        "gpu": torch.cuda.get_device_name() if is_cuda else None,
        "torch": torch.__version__,
        "processors": os.cpu_count(),
        "turns": options.turns,
        "median_ms": {name: [round(turn[name] * 1e3, 4) for turn in turns] for name in names},
        "over_alone": {name: summary(values) for name, values in ratios.items()},
        "oom_over_history": summary(against_history),
    }
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


def summary(values: list[float]) -> dict[str, float]:
    """The median of the turns, and their lowest and highest."""
    return {
        name: round(function(values), 4)
        for name, function in (("median", statistics.median), ("lowest", min), ("highest", max))
    }


if __name__ == "__main__":
    main()
