"""Time estimates and simulated steps as whole processes, imports included.

    python benchmarks/timings.py benchmarks/results/timings.json

Wall-clock time depends on other load of the machine; CPU time, user and system together, hardly does.
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

STEP = ("step", "--device", "simulated", "--no-trace", "--json")
LARGE = ("--precision", "bf16", "--lora", "16", "--batch", "1")
# name: (words after `ligerprof`, the most seconds it may take)
COMMANDS: dict[str, tuple[tuple[str, ...], float]] = {
    "estimate llama3.2-1b": (("estimate", "--json"), 0.3),
    "estimate llama3.1-405b, ZeRO-3 on 4096 GPUs": (
        (
            *("estimate", "--json", "--model", "llama3.1-405b", "--engine", "deepspeed"),
            *("--precision", "mixed", "--zero", "3", "--gpus", "4096"),
        ),
        0.3,
    ),
    "simulated step, llama3.2-1b": (STEP, 10),
    "simulated step, llama3.1-8b": ((*STEP, "--model", "llama3.1-8b", "--precision", "bf16"), 15),
    "simulated step, llama3.1-70b with LoRA": ((*STEP, "--model", "llama3.1-70b", *LARGE), 40),
}
REPEATS = 2


def measure(words: tuple[str, ...]) -> dict[str, float]:
    """Wall-clock and CPU seconds of the fastest of a few runs, and of the start of Python just before."""
    runs = []
    for _ in range(REPEATS):
        start = run_python(("-c", "pass"))
        with tempfile.TemporaryDirectory() as folder:
            place = ("-o", f"{folder}/run") if words[0] == "step" else ()
            run = run_python(("-m", "ligerprof", *words, *place))
        runs.append({**run, **{f"python_{key}": value for key, value in start.items()}})
    return min(runs, key=lambda run: run["wall_seconds"])


def run_python(words: tuple[str, ...]) -> dict[str, float]:
    """Wall-clock and CPU seconds of one process."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    finished = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    wall = time.monotonic() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if finished.returncode != 0:
        raise SystemExit(f"{' '.join(words)}: {finished.stderr[-500:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_seconds": round(wall, 3), "cpu_seconds": round(cpu, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    results = parser.parse_args().results
    rows: dict[str, Any] = {}
    for name, (words, most) in COMMANDS.items():
        rows[name] = {"command": " ".join(words), "goal_seconds": most, **measure(words), "load": os.getloadavg()[0]}
        print(name, rows[name], file=sys.stderr, flush=True)
    machine = {"cores": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version()}
    results.write_text(json.dumps({"machine": machine, "fastest_of": REPEATS, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
