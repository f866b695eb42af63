"""The measured programs of unchanged_programs/ on the simulated GPU: their peaks against torch's counters on the H200.

python benchmarks/unchanged_programs/make.py DATA
python benchmarks/simulated_programs.py DATA results.jsonl [--only NAME,...]

`--set held-out`, also of make.py, takes the held-out programs instead.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
PROGRAMS = HERE / "unchanged_programs"
sys.path.insert(0, str(PROGRAMS))

import cases  # noqa: E402 - modules of the programs
import held_out_cases  # noqa: E402

OURS = [sys.executable, "-m", "ligerprof", "run", "--device", "simulated", "--json"]
SETS = {
    "known": (cases.CASES, HERE / "results/unchanged-programs-h200.jsonl"),
    "held-out": (held_out_cases.CASES, HERE / "results/held-out-programs-h200.jsonl"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--set", choices=SETS, default="known")
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=900, help="time limit of one program")
    options = parser.parse_args()
    chosen = set(filter(None, options.only.split(",")))
    programs, path = SETS[options.set]
    measured = {row["name"]: row for row in map(json.loads, path.read_text().splitlines())}
    with options.results.open("w") as file:
        for name, case in programs.items():
            if name in measured and (not chosen or name in chosen):
                row = compare(name, case, measured[name], options.data.resolve(), options.seconds)
                print(json.dumps(row), file=file, flush=True)
                print(row["name"], row.get("peak_error"), row.get("reserved_error"), row["problem"])


def compare(name: str, case: object, truth: dict, data: Path, seconds: float) -> dict:
    words = case.argv.format(data=data).split()
    program = [str(PROGRAMS / words[0])] if words[0].endswith(".py") else ["-m", words[0]]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [*OURS, "-o", f"{folder}/run", "--", sys.executable, *program, *words[1:]]
        environment = {**os.environ, **case.env}
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            return {"name": name, "seconds": seconds, "exit_code": 124, "problem": "took longer than the time limit"}
    row = {"name": name, "seconds": round(time.monotonic() - started, 1), "exit_code": done.returncode, "problem": ""}
    ranks = json.loads(done.stdout)["ranks"] if done.stdout else []
    if (done.returncode == 0) != (truth["exit_code"] == 0) or not ranks:
        row["problem"] = next((line for line in reversed(done.stderr.splitlines()) if "rror" in line), "no recording")
        return row
    row |= {key: ranks[0][key] for key in ("peak_bytes", "reserved_bytes")}
    row["peak_error"] = row["peak_bytes"] / truth["peak_bytes"] - 1
    row["reserved_error"] = row["reserved_bytes"] / truth["reserved_bytes"] - 1
    return row


if __name__ == "__main__":
    main()
