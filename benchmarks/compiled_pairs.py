"""Measure what torch.compile changes of a training's memory: the same program with and without it, on a GPU.

    python benchmarks/compiled_pairs.py benchmarks/results/compiled-pairs-h200.jsonl
    python benchmarks/compiled_pairs.py --table benchmarks/results/compiled-pairs-h200.jsonl

The program is unchanged_programs/trainer_arguments.py, whose `--torch_compile` is the Trainer's.
"""

import argparse
import datetime as dt
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from unchanged_programs import PROGRAMS, QUIET, versions

SMALL = "--layers 4 --width 1024 --seq 1024 --per_device_train_batch_size 8"
LARGE = "--layers 8 --width 2048 --seq 2048 --per_device_train_batch_size 2"
VARIANTS = {
    "small-bf16": f"{SMALL} --bf16",
    "small-fp32": SMALL,
    "small-bf16-checkpointed": f"{SMALL} --bf16 --gradient_checkpointing",
    "large-bf16": f"{LARGE} --bf16",
    "large-bf16-checkpointed": f"{LARGE} --bf16 --gradient_checkpointing",
    "large-bf16-accumulated": f"{LARGE} --bf16 --gradient_accumulation_steps 2",
}


def run(arguments: str, compiled: bool, out: str) -> dict[str, Any]:
    words = [*arguments.split(), "--max_steps", "3", "--report_to", "none", "--output_dir", out]
    words += ["--save_strategy", "no", *(["--torch_compile"] if compiled else [])]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "peak.py"), str(PROGRAMS / "trainer_arguments.py"), *words],
        env={**os.environ, **QUIET},
        capture_output=True,
        text=True,
        check=False,
    )
    row: dict[str, Any] = {"exit_code": done.returncode, "seconds": round(time.monotonic() - began, 1)}
    for line in done.stderr.splitlines():
        if line.startswith("TORCH-PEAK "):
            row |= json.loads(line.removeprefix("TORCH-PEAK "))
    return row if done.returncode == 0 else row | {"error": done.stderr.splitlines()[-8:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--table", action="store_true", help="print the differences of rows that were measured")
    options = parser.parse_args()
    if not options.table:
        about = {"date": dt.datetime.now(dt.UTC).date().isoformat(), "versions": versions()}
        cases = [(name, compiled) for name in VARIANTS for compiled in (False, True)]
        with tempfile.TemporaryDirectory() as out, ThreadPoolExecutor(len(cases)) as pool:
            rows = pool.map(lambda case: run(VARIANTS[case[0]], case[1], out), cases)
            with options.results.open("a") as file:
                for (name, compiled), row in zip(cases, rows, strict=True):
                    line = {"name": name, "arguments": VARIANTS[name], "compiled": compiled, **row, **about}
                    file.write(json.dumps(line) + "\n")
    peaks: dict[str, dict[bool, int]] = {}
    for row in map(json.loads, options.results.read_text().splitlines()):
        if row["exit_code"] == 0:
            peaks.setdefault(row["name"], {})[row["compiled"]] = row["peak_bytes"]
    for name, pair in peaks.items():
        if len(pair) == 2:
            print(f"{name:28} {pair[False]:>14,} {pair[True]:>14,} {pair[True] / pair[False] - 1:+.1%}")


if __name__ == "__main__":
    main()
