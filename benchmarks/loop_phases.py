"""Compare the peak of each phase of TRL's trainers, recorded on a GPU, with the same commands on a simulated one.

    python benchmarks/unchanged_programs/make.py DATA
    python benchmarks/loop_phases.py measure DATA RESULT.jsonl [CONFIG…]
    python benchmarks/loop_phases.py simulate DATA RESULT.jsonl [CONFIG…]
    python benchmarks/loop_phases.py table MEASURED.jsonl SIMULATED.jsonl

`measure` also runs torch's own counters in the process, whose peak the recording has to equal.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).parent / "unchanged_programs"
CONFIGS = (
    "grpo-reference",
    "grpo-06b",
    "grpo-06b-lora",
    "grpo-17b",
    "grpo-17b-lora",
    "rloo-lora",
    "dpo-reference",
    "dpo-lora-1b",
    "dpo-precomputed",
    "kto-lora",
    "orpo",
    "reward-pairs",
    "distillation-06b",
)
SECONDS = 300
_SAID = ("config", "exit", "seconds", "torch_peak_bytes", "peak_bytes", "peak_phase", "phases", "problem")


def program(data: Path, name: str) -> list[str]:
    """The command of a configuration under torch's own counters; TRL has no script for ORPO."""
    peak = [sys.executable, str(PROGRAMS / "peak.py")]
    if name == "orpo":
        return [*peak, str(PROGRAMS / "held_out" / "no_reference.py"), str(data / "smol"), str(data / "preference")]
    return [*peak, f"trl.scripts.{name.partition('-')[0]}", "--config", str(data / "configs" / f"{name}.yaml")]


def run(data: Path, name: str, *, simulated: bool) -> dict[str, Any]:
    import torch
    import transformers
    import trl

    device = ["--device", "simulated", "--gpu", "h200"] if simulated else []
    env = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if simulated else {})
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        command = [sys.executable, "-m", "ligerprof", "run", "--json", *device, "-o", f"{folder}/run", "--"]
        command += program(data, name)
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
        row: dict[str, Any] = {"config": name, "simulated": simulated, "exit": done.returncode}
        row["seconds"] = round(time.monotonic() - started, 1)
        peaks = [line for line in done.stderr.splitlines() if line.startswith("TORCH-PEAK ")]
        row["torch_peak_bytes"] = json.loads(peaks[-1].removeprefix("TORCH-PEAK "))["peak_bytes"] if peaks else None
        explain = [sys.executable, "-m", "ligerprof", "explain", f"{folder}/run", "--json"]
        found = json.loads(subprocess.run(explain, capture_output=True, text=True, check=False).stdout or "{}")
    row |= {key: found.get(key) for key in ("peak_bytes", "reserved_bytes", "peak_phase", "phases", "roles")}
    row |= {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
    return row if row["phases"] else row | {"problem": done.stderr[-500:]}


def collect(data: Path, results: Path, names: list[str], *, simulated: bool, jobs: int) -> None:
    import torch

    gpu = "simulated NVIDIA H200" if simulated else torch.cuda.get_device_name(0)
    with results.open("x") as out, ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(run, data, name, simulated=simulated) for name in names or CONFIGS]):
            row = done.result()
            out.write(json.dumps({"date": time.strftime("%Y-%m-%d"), "gpu": gpu} | row) + "\n")
            out.flush()
            print({key: row.get(key) for key in _SAID}, file=sys.stderr, flush=True)


def table(measured: Path, simulated: Path) -> None:
    def read(path: Path) -> dict[str, Any]:
        return {row["config"]: row for row in map(json.loads, path.read_text().splitlines())}

    found = read(simulated)
    for name, row in read(measured).items():
        equal = row["peak_bytes"] == row["torch_peak_bytes"]
        print(
            f"{name}: peak {row['peak_bytes']:,} in {row['peak_phase']}, {'equal to' if equal else 'not'} torch's own"
        )
        for phase, size_bytes in (row["phases"] or {}).items():
            other = (found.get(name, {}).get("phases") or {}).get(phase)
            off = "" if other is None else f"{100 * (other / size_bytes - 1):+9.3f} %"
            print(f"  {phase:12}{size_bytes:>16,}{off}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("measure", "simulate", "table"))
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("configs", nargs="*")
    parser.add_argument("--jobs", type=int, default=4, help="programs at a time; peaks do not depend on it")
    args = parser.parse_args()
    if args.action == "table":
        table(args.first, args.second)
    else:
        collect(args.first, args.second, args.configs, simulated=args.action == "simulate", jobs=args.jobs)
