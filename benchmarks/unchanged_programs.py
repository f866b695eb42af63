"""Measure the programs in unchanged_programs/ on a GPU: torch's own counters, and how little memory is enough.

The programs do not know ligerprof (own_kernels.py uses its kernels alone). Each runs in a process of its own; peak.py
prints torch's counters at the end.

    python benchmarks/unchanged_programs/make.py DATA
    python benchmarks/unchanged_programs.py measure DATA benchmarks/results/unchanged-programs-h200.jsonl
    python benchmarks/unchanged_programs.py borders DATA benchmarks/results/unchanged-programs-h200.jsonl \\
        benchmarks/results/unchanged-borders-h200.jsonl
    python benchmarks/unchanged_programs.py try DATA   # with `make.py --tiny`, on a CPU

`--set held-out`, also of make.py, takes the held-out programs instead; `--set libraries` those of single libraries,
which read the data of the first set.
"""

import argparse
import datetime as dt
import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).parent / "unchanged_programs"
sys.path.insert(0, str(PROGRAMS))

import cases  # noqa: E402
import compiled_cases  # noqa: E402
import fresh_cases  # noqa: E402
import held_out_cases  # noqa: E402
import library_cases  # noqa: E402
from cases import Case  # noqa: E402

SETS = {
    "known": cases,
    "held-out": held_out_cases,
    "libraries": library_cases,
    "fresh": fresh_cases,
    "compiled": compiled_cases,
}

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "lightning", "timm")
MORE_PACKAGES = ("liger-kernel", "sentence-transformers", "triton", "bitsandbytes", "torchao", "deepspeed", "diffusers")
QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES + MORE_PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"python": sys.version.split()[0], **found}


def run_case(case: Case, data: Path, seconds: float, tiny: bool = False, limit_bytes: int = 0) -> dict[str, Any]:
    """Runs one program and gives its exit code, seconds, last lines and what peak.py printed."""
    argv = shlex.split(case.argv.format(data=data.resolve()) + (f" {case.tiny}" if tiny else ""))
    program = [str(PROGRAMS / argv[0]) if argv[0].endswith(".py") else argv[0], *argv[1:]]
    environment = {**os.environ, **QUIET, **case.env}
    if limit_bytes:
        environment["MEMORY_LIMIT_BYTES"] = str(limit_bytes)
    begin = time.monotonic()
    command = [sys.executable, str(PROGRAMS / "peak.py"), *program]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
        code, output, errors = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        code, output, errors = 124, str(late.stdout or b""), str(late.stderr or b"")
    row: dict[str, Any] = {"name": case.name, "argv": case.argv, "env": case.env, "exit_code": code}
    row["seconds"] = round(time.monotonic() - begin, 1)
    lines = errors.splitlines()
    for line in lines:
        if line.startswith("TORCH-PEAK "):
            row |= json.loads(line.removeprefix("TORCH-PEAK "))
    row["printed"] = output.splitlines()[-12:]
    if code:
        row["error"] = [line[:300] for line in lines if not line.startswith("TORCH-PEAK ")][-12:]
    return row


class Results:
    """Rows appended to a file from several threads."""

    def __init__(self, path: Path) -> None:
        self.path, self.lock = path, threading.Lock()
        import torch

        where = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
        today = dt.datetime.now(dt.UTC).date().isoformat()
        self.about = {"gpu": where, "date": today, "versions": versions()}

    def add(self, row: dict[str, Any]) -> None:
        with self.lock, self.path.open("a") as lines:
            lines.write(json.dumps({**row, **self.about}) + "\n")
        said = {key: row[key] for key in ("exit_code", "seconds", "peak_bytes", "reserved_bytes") if key in row}
        print(row["name"], said, *row.get("error", [])[-4:], sep="\n    ", flush=True)


def search(case: Case, data: Path, row: dict[str, Any], seconds: float, count: int) -> dict[str, Any]:
    """Bisects the smallest memory limit with which the program ends well, between its peak and what it reserved."""
    fails, runs = row["peak_bytes"] - 1, row["reserved_bytes"]
    trials = []
    for _ in range(count):
        middle = (fails + runs) // 2
        done = run_case(case, data, seconds, limit_bytes=middle)
        trials.append({"limit_bytes": middle, **{key: done.get(key) for key in ("exit_code", "retries", "seconds")}})
        if done["exit_code"] == 0:
            runs = middle
        else:
            fails = middle
    found = {"smallest_that_runs_bytes": runs, "largest_that_fails_bytes": fails, "trials": trials}
    kept = ("name", "argv", "env", "peak_bytes", "reserved_bytes", "total_memory_bytes")
    return {key: row[key] for key in kept} | found


def each(names: list[str], at_once: int, work: Callable[[str], None]) -> None:
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(work, names))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["measure", "borders", "try"])
    parser.add_argument("data", type=Path)
    parser.add_argument("results", type=Path, nargs="?", default=Path("/dev/null"))
    parser.add_argument("found", type=Path, nargs="?", help="where borders writes its rows")
    parser.add_argument("--set", choices=SETS, default="known", help="the programs to run")
    parser.add_argument("--only", help="names, with commas")
    parser.add_argument("--at-once", type=int, default=5)
    parser.add_argument("--trials", type=int, default=8, help="runs that borders takes for a program")
    parser.add_argument("--seconds", type=float, default=150, help="time limit of one program")
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else None
    programs = SETS[arguments.set].CASES
    if arguments.action == "borders":
        measured = {row["name"]: row for row in map(json.loads, arguments.results.read_text().splitlines())}
        results = Results(arguments.found)
        chosen = names or SETS[arguments.set].BORDERS
        each(
            chosen,
            arguments.at_once,
            lambda name: results.add(
                search(programs[name], arguments.data, measured[name], arguments.seconds, arguments.trials)
            ),
        )
        return
    tiny = arguments.action == "try"
    results = Results(arguments.results)
    chosen = names or [name for name, case in programs.items() if not tiny or case.tiny is not None]
    each(
        chosen,
        1 if tiny else arguments.at_once,
        lambda name: results.add(run_case(programs[name], arguments.data, arguments.seconds, tiny=tiny)),
    )


if __name__ == "__main__":
    main()
