"""How long the simulation of a whole run of 10,000 steps takes, as the command that its user calls.

    python benchmarks/whole_runs.py benchmarks/results/whole-runs.json

It takes about five minutes on a machine without other load. Each row has drawn lengths in random order, for
micro-batches of four. The goal is a minute of CPU time per run: other load
changes it less than time on the clock.
"""

import argparse
import datetime as dt
import json
import os
import platform
import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from everyday import measure

STEPS, BATCH = 10_000, 4
GOAL_SECONDS = 60
LLAMA = ("--model", "llama3.2-1b")
ACCUMULATION = 8
LLAMA_8B = ("--model", "llama3.1-8b", "--lora", "16", "--precision", "bf16-amp")
QWEN_7B = ("--model", "qwen2.5-7b", "--lora", "16", "--precision", "bf16")


def bimodal(draw: random.Random) -> int:
    """Short questions and long documents."""
    return int(draw.gauss(180, 40)) if draw.random() < 0.7 else int(draw.gauss(1600, 300))


LENGTHS: Mapping[str, Callable[[random.Random], int]] = {
    "uniform": lambda draw: draw.randint(16, 2048),
    "chat": lambda draw: int(draw.lognormvariate(6, 1)),
    "bimodal": bimodal,
    "long": lambda draw: int(draw.lognormvariate(8.5, 0.8)),
}
# name, lengths, tokens that sequences are cut to, micro-batches per step, and the recipe
CASES: tuple[tuple[str, str, int, int, tuple[str, ...]], ...] = (
    ("Llama 3.2 1B", "uniform", 2048, 1, LLAMA),
    ("Llama 3.2 1B, fused loss", "chat", 2048, 1, (*LLAMA, "--liger", "flce")),
    ("Llama 3.1 8B, LoRA", "bimodal", 2048, 1, LLAMA_8B),
    ("Qwen 2.5 7B, LoRA", "chat", 2048, 1, QWEN_7B),
    ("Qwen 2.5 7B, LoRA, fused loss", "long", 8192, 1, (*QWEN_7B, "--liger", "flce")),
    ("Llama 3.2 1B, accumulated", "uniform", 2048, ACCUMULATION, LLAMA),
    ("Llama 3.1 8B, LoRA, accumulated", "bimodal", 2048, ACCUMULATION, LLAMA_8B),
)


def main() -> None:
    """Run each case and write the seconds that it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, lengths, seq, accumulation, recipe in CASES:
            path = Path(folder, f"{lengths}.txt")
            draw = random.Random(7)
            drawn = (max(8, LENGTHS[lengths](draw)) for _ in range(STEPS * BATCH * accumulation))
            path.write_text("\n".join(map(str, drawn)), encoding="utf-8")
            batches = ("--batch", str(BATCH), "--grad-accum", str(accumulation), "--seq", str(seq))
            words = (
                "-m",
                "ligerprof",
                "estimate",
                "--simulate",
                "--gpu",
                "h100",
                *recipe,
                *batches,
                "--lengths",
                str(path),
            )
            seconds = measure(words)
            met = seconds["cpu_seconds"] <= GOAL_SECONDS
            print(f"{name}, {lengths}: {seconds['cpu_seconds']} s, {'met' if met else 'MISSED'}", flush=True)
            case = {"case": name, "lengths": lengths, "seq": seq, "grad_accum": accumulation}
            rows.append({**case, "recipe": recipe, **seconds})
    about = {"python": platform.python_version(), "cores": os.cpu_count(), "load_average": load}
    result = {
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
        **about,
        "steps": STEPS,
        "goal_cpu_seconds": GOAL_SECONDS,
        "rows": rows,
    }
    options.results.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
