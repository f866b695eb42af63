"""The measured programs of unchanged_programs/ on the simulated GPU: peaks, roles and borders against the H200's.

python benchmarks/unchanged_programs/make.py DATA --empty
python benchmarks/simulated_programs.py programs DATA results.jsonl [--only NAME,...] [--at-once N]
python benchmarks/simulated_programs.py borders DATA results.jsonl
python benchmarks/simulated_programs.py table results.jsonl

`--set held-out`, also of make.py, takes the held-out programs instead.
"""

import argparse
import datetime as dt
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
PROGRAMS = HERE / "unchanged_programs"
sys.path.insert(0, str(PROGRAMS))

import cases  # noqa: E402 - modules of the programs
import compiled_cases  # noqa: E402
import fresh_cases  # noqa: E402
import held_out_cases  # noqa: E402
import library_cases  # noqa: E402
from cases import Case  # noqa: E402

OURS = [sys.executable, "-m", "ligerprof", "run", "--device", "simulated", "--gpu", "h200", "--json"]
SETS = {
    "known": (cases.CASES, "unchanged"),
    "held-out": (held_out_cases.CASES, "held-out"),
    "libraries": (library_cases.CASES, "library"),
    "fresh": (fresh_cases.CASES, "fresh"),
    "compiled": (compiled_cases.CASES, "compiled"),
}
OUT_OF_MEMORY = 3
# the border is searched until both ends are this close
PRECISION = 1 / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("programs", "borders", "table"))
    parser.add_argument("data", type=Path)
    parser.add_argument("results", type=Path, nargs="?")
    parser.add_argument("--set", choices=SETS, default="known")
    parser.add_argument("--only", default="")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600, help="time limit of one program")
    options = parser.parse_args()
    if options.action == "table":
        table(options.data)
        return
    chosen = set(filter(None, options.only.split(",")))
    programs, name = SETS[options.set]
    rows = map(json.loads, (HERE / f"results/{name}-{options.action}-h200.jsonl").read_text().splitlines())
    measured = [row for row in rows if row["name"] in programs and (not chosen or row["name"] in chosen)]
    compare = compare_border if options.action == "borders" else compare_peak
    lock = threading.Lock()
    about = {name: version(name) for name in ("torch", "transformers")} | {
        "date": dt.datetime.now(dt.UTC).date().isoformat()
    }

    def work(truth: dict) -> None:
        row = {"name": truth["name"]} | compare(programs[truth["name"]], truth, options) | about
        with lock, options.results.open("a") as file:
            print(json.dumps(row), file=file, flush=True)
            print({key: value for key, value in row.items() if "error" in key or key in ("name", "problem")})

    with ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(work, measured))


def table(results: Path) -> None:
    """Prints the row of docs/simulated-gpu.md."""
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    peaks = sorted(abs(row["peak_error"]) for row in rows if "peak_error" in row)
    reserved = sorted(abs(row["reserved_error"]) for row in rows if "reserved_error" in row)
    figures = (
        f"{statistics.median(peaks):.4%} | {peaks[-1]:.2%} | {statistics.median(reserved):.2%} | {reserved[-1]:.1%}"
    )
    print(f"| {len(rows)} | {len(peaks)} | {peaks.count(0)} | {figures.replace('%', ' %')} |")


def simulate(case: Case, options: argparse.Namespace, *limit: str) -> tuple[int, dict | None, str]:
    """Runs a program; gives its exit code, its report and the last line about an error."""
    words = shlex.split(case.argv.format(data=options.data.resolve()))
    program = [str(PROGRAMS / words[0])] if words[0].endswith(".py") else ["-m", words[0]]
    with tempfile.TemporaryDirectory() as folder:
        command = [*OURS, *limit, "-o", f"{folder}/run", "--", sys.executable, *program, *words[1:]]
        environment = {**os.environ, **case.env}
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=options.seconds,
            )
        except subprocess.TimeoutExpired:
            return 124, None, f"over {options.seconds:.0f} s"
    report = json.loads(done.stdout) if done.stdout else {"ranks": [], "notes": []}
    starts = ("ligerprof: /", "ligerprof: ?")
    errors = [line for line in done.stderr.splitlines() if "rror" in line or line.startswith(starts)]
    problem = (errors[-1:] or report["notes"] or ["no recording"])[0]
    return done.returncode, next(iter(report["ranks"]), None), problem


def compare_peak(case: Case, truth: dict, options: argparse.Namespace) -> dict:
    started = time.monotonic()
    code, rank, error = simulate(case, options)
    row = {"seconds": round(time.monotonic() - started, 1), "exit_code": code, "problem": ""}
    if (code == 0) != (truth["exit_code"] == 0) or rank is None:
        return row | {"problem": error}
    row |= {key: rank[key] for key in ("peak_bytes", "reserved_bytes")}
    row["peak_error"] = row["peak_bytes"] / truth["peak_bytes"] - 1
    if truth["reserved_bytes"]:
        row["reserved_error"] = row["reserved_bytes"] / truth["reserved_bytes"] - 1
    if "roles" in truth:
        ours = row["roles"] = rank["roles"]
        names = ours.keys() | truth["roles"].keys()
        row["largest_role_error"] = (
            max(abs(ours.get(name, 0) - truth["roles"].get(name, 0)) for name in names) / truth["peak_bytes"]
        )
    return row


def compare_border(case: Case, truth: dict, options: argparse.Namespace) -> dict:
    """Bisects the smallest limit with which the program ends well."""
    started = time.monotonic()
    fails, runs, trials = truth["peak_bytes"] * 0.97, truth["reserved_bytes"] * 1.03, 0
    while runs / fails - 1 > PRECISION:
        middle = (fails + runs) / 2
        code, _, error = simulate(case, options, "--memory-limit", f"{int(middle)} B")
        if code not in (0, 1, OUT_OF_MEMORY):
            return {"problem": error}
        fails, runs = (fails, middle) if code == 0 else (middle, runs)
        trials += 1
    middle = (truth["smallest_that_runs_bytes"] + truth["largest_that_fails_bytes"]) / 2
    return {
        "seconds": round(time.monotonic() - started, 1),
        "problem": "",
        "trials": trials,
        "smallest_that_runs_bytes": int(runs),
        "largest_that_fails_bytes": int(fails),
        "border_error": (runs + fails) / 2 / middle - 1,
    }


if __name__ == "__main__":
    main()
