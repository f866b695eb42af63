"""Measure a grid of training steps on a GPU, then compare each with the simulation and the estimate.

    python benchmarks/steps.py measure benchmarks/results/steps-h200.jsonl
    python benchmarks/steps.py table benchmarks/results/steps-h200.jsonl > docs/results/steps-h200.md

`measure` requires a GPU and writes one `ligerprof step --json` object per line. `table` does not.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GRID = tuple(
    itertools.product(("bf16", "amp"), ("--no-checkpointing", "--checkpointing"), ("none", "no-flce", "flce", "all"))
)
KEPT = ("recipe", "backend", "gpu", "peak_bytes", "peak_phase", "reserved_bytes", "first_step_peak_bytes", "phases")
KEPT_TOO = ("roles", "step_seconds", "tokens_per_second", "oom", "versions", "finished", "notes")


def ligerprof(command: str, *options: str) -> dict[str, Any]:
    finished = subprocess.run(
        [sys.executable, "-m", "ligerprof", command, *options, "--json"], capture_output=True, text=True, check=False
    )
    if finished.returncode not in (0, 3):
        raise SystemExit(f"{command} {' '.join(options)}: {finished.stderr}")
    result: dict[str, Any] = json.loads(finished.stdout)
    return result


def recipe_options(recipe: dict[str, Any]) -> list[str]:
    checkpointing = "--checkpointing" if recipe["checkpointing"] else "--no-checkpointing"
    named = {key: recipe[key] for key in ("model", "batch", "seq", "liger", "provider", "precision", "optimizer")}
    return [checkpointing, *itertools.chain(*((f"--{key}", str(value)) for key, value in named.items()))]


def step(device: str, options: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return ligerprof("step", "--device", device, "-o", f"{folder}/run", *options)


def measure(results: Path) -> None:
    for precision, checkpointing, liger in GRID:
        row = step("cuda", [checkpointing, "--precision", precision, "--liger", liger])
        with results.open("a") as lines:
            lines.write(json.dumps({key: row[key] for key in (*KEPT, *KEPT_TOO)}) + "\n")
        print(precision, checkpointing, liger, row["peak_bytes"], row["step_seconds"], file=sys.stderr)


def table_rows(results: Path) -> Iterator[str]:
    columns = ("precision", "checkpointing", "kernels", "measured, MiB", "simulated", "error", "estimated", "error")
    yield f"| {' | '.join(columns)} | ms per step |"
    yield "|---|---|---|---:|---:|---:|---:|---:|---:|"
    for line in results.read_text().splitlines():
        row = json.loads(line)
        recipe, measured = row["recipe"], row["peak_bytes"]
        options = recipe_options(recipe)
        simulated = step("simulated", options)["peak_bytes"]
        estimated = ligerprof("estimate", *options)["peak_bytes"]
        cells = [recipe["precision"], "yes" if recipe["checkpointing"] else "no", "+".join(recipe["kernels"]) or "none"]
        cells += [f"{measured / 2**20:,.1f}"]
        for predicted in (simulated, estimated):
            cells += [f"{predicted / 2**20:,.1f}", f"{100 * (predicted / measured - 1):+.3f} %"]
        cells.append(f"{row['step_seconds'] * 1000:.1f}")
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "table"))
    parser.add_argument("results", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "measure":
        measure(arguments.results)
    else:
        for row in table_rows(arguments.results):
            print(row, flush=True)


main()
