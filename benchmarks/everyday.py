"""How long everyday commands take as whole processes, next to Python's and torch's own start.

    python benchmarks/everyday.py benchmarks/results/everyday.json

It takes about two minutes on a machine without other load. CPU time, user and system together, includes child
processes. Each row is the fastest of two runs, and has the start of Python that was measured just before.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPEATS = 2
PYTHON = ("-c", "pass")
TINY = ("--model", "tiny", "--seq", "64", "--device", "simulated")
# name: (words after `python`, the most seconds it may take, None for the comparisons); {} is a new folder
COMMANDS: dict[str, tuple[tuple[str, ...], float | None]] = {
    "python": (PYTHON, None),
    "python, import torch": (("-c", "import torch"), None),
    "python, import torch and a model's classes": (
        ("-c", "import torch; from transformers import LlamaForCausalLM"),
        None,
    ),
    "step, tiny": (("-m", "ligerprof", "step", *TINY, "-o", "{}/tiny"), 5),
    "step, 1B": (("-m", "ligerprof", "step", "--device", "simulated", "-o", "{}/1b"), 6),
    "fit, 1B": (("-m", "ligerprof", "fit", "--device", "simulated", "--memory-limit", "24GiB"), 10),
    "sweep, 12 tiny cells": (
        (
            *("-m", "ligerprof", "sweep", *TINY, "--batch", "1,2,4,8", "--liger", "none,no-flce,all"),
            *("-o", "{}/sweep"),
        ),
        30,
    ),
    "plot of the sweep": (("-m", "ligerprof", "plot", "{}/sweep", "-o", "{}/figures"), 4),
}


def measure(words: tuple[str, ...]) -> dict[str, float]:
    """Wall-clock and CPU seconds of one run."""
    command = [sys.executable, *words]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    wall_seconds = time.monotonic() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if finished.returncode != 0:
        raise SystemExit(f"{' '.join(words)}: {finished.stderr[-500:]}")
    cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_seconds": round(wall_seconds, 3), "cpu_seconds": round(cpu_seconds, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    arguments = parser.parse_args()
    # fills the file cache
    subprocess.run([sys.executable, "-c", "import torch, transformers, matplotlib.pyplot"], check=True)
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (words, goal_seconds) in COMMANDS.items():
            runs = []
            for number in range(REPEATS):
                place = f"{folder}/{number}"
                Path(place).mkdir(exist_ok=True)
                start = measure(PYTHON)
                filled = tuple(word.format(place) if "{}" in word else word for word in words)
                runs.append({**measure(filled), **{f"python_{key}": value for key, value in start.items()}})
            rows[name] = {
                "command": " ".join(("python", *words)).replace("python -m ligerprof", "ligerprof"),
                "goal_seconds": goal_seconds,
                **min(runs, key=lambda run: run["wall_seconds"]),
                "load": round(os.getloadavg()[0], 2),
            }
            print(name, rows[name], flush=True)
    machine = {"cores": os.cpu_count(), "processor": platform.processor(), "python": platform.python_version()}
    content = {"machine": machine, "fastest_of": REPEATS, "rows": rows}
    arguments.results.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
