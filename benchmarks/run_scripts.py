"""Run the scripts in run_scripts/ under `ligerprof run`: their peaks against torch's counter, phases, and overhead.

The scripts do not know ligerprof. Those that print `PEAK` give torch.cuda.max_memory_allocated() at their end, and
each `STEP` line is the duration of a step. For the overhead, a script runs in turns alone, with `--steps 2:3`, with all
steps recorded, and with LIGERPROF=oom.

    python benchmarks/run_scripts.py results/ --only plain,image --overhead plain --turns 3
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SCRIPTS = HERE / "run_scripts"
FIRST_TIMED = 6


def launch(script: Path, *, options: list[str] | None, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Run a script, under `ligerprof run` if there are options; what it printed and how it ended."""
    command = [sys.executable, str(script)]
    if options is not None:
        command = [sys.executable, "-m", "ligerprof", "run", "--json", *options, "--", *command]
    begin = time.perf_counter()
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, **(environment or {})},
        timeout=500,
    )
    # with --json, the script's own output is on stderr
    printed = (done.stdout if options is None else "") + done.stderr
    words = [line.split() for line in printed.splitlines()]
    return {
        "exit_code": done.returncode,
        "seconds": round(time.perf_counter() - begin, 2),
        "result": json.loads(done.stdout) if options is not None and done.stdout.strip() else None,
        "peaks": [int(line[1]) for line in words if line[:1] == ["PEAK"] and len(line) == 2],
        "steps": [float(line[1]) for line in words if line[:1] == ["STEP"]],
        "said": [line for line in printed.splitlines() if line.startswith(("FAILURES", "GRAPHS", "ligerprof:"))],
        "tail": printed[-1500:],
    }


def check(script: Path, folder: Path) -> dict[str, Any]:
    """Record a script, and compare its peaks."""
    run = folder / script.stem
    got = launch(script, options=["-o", str(run)])
    ranks = got["result"]["ranks"] if got["result"] else []
    found = {
        "script": script.stem,
        "exit_code": got["exit_code"],
        "seconds": got["seconds"],
        "torch_peaks": sorted(got["peaks"]),
        "ranks": [
            {
                **{key: rank[key] for key in ("rank", "peak_bytes", "complete", "phase", "step", "steps", "phases")},
                "roles": {role: size for role, size in rank["roles"].items() if size},
                "oom": rank["oom"] and {key: rank["oom"].get(key) for key in ("phase", "step", "module", "caught")},
                "suggestions": [suggestion.get("title", suggestion) for suggestion in rank["suggestions"]][:3],
            }
            for rank in ranks
        ],
        "notes": got["result"]["notes"] if got["result"] else None,
        "said": got["said"],
    }
    found["equal"] = found["torch_peaks"] == sorted(rank["peak_bytes"] for rank in found["ranks"])
    if not found["equal"] or got["exit_code"]:
        found["tail"] = got["tail"]
    shown = subprocess.run(
        [sys.executable, "-m", "ligerprof", "explain", "--by", "phase", str(run)],
        check=False,
        capture_output=True,
        text=True,
    )
    found["explained"] = (shown.stdout + shown.stderr)[:2500]
    shutil.rmtree(run, ignore_errors=True)
    return found


def overhead(script: Path, folder: Path, turns: int) -> dict[str, Any]:
    """Median step of each way to run a script, over turns that alternate; for `--steps 2:3`, of other steps."""
    run = folder / "overhead"
    ways: dict[str, dict[str, Any]] = {
        "alone": {"options": None},
        "outside": {"options": ["--steps", "2:3", "-o", str(run), "--force"]},
        "recorded": {"options": ["-o", str(run), "--force"]},
        "oom": {"options": None, "environment": {"LIGERPROF": "oom", **startup()}},
        "history": {"options": None, "environment": {"BENCHMARK_HISTORY": "1"}},
    }
    medians: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(turns):
        for way, how in ways.items():
            if way == "history":
                source = script.read_text(encoding="utf-8").replace(
                    "torch.manual_seed(0)\n",
                    "torch.manual_seed(0)\n"
                    "torch.cuda.memory._record_memory_history(max_entries=300000, stacks='python', context='alloc')\n",
                    1,
                )
                own = folder / f"{script.stem}_history.py"
                own.write_text(source, encoding="utf-8")
                got = launch(own, **how)
                own.unlink()
            else:
                got = launch(script, **how)
            timed = got["steps"][FIRST_TIMED:]
            medians[way].append(statistics.median(timed) if timed else float("nan"))
    base = statistics.median(medians["alone"])
    return {
        "script": script.stem,
        "median_ms": {way: round(statistics.median(values) * 1e3, 3) for way, values in medians.items()},
        "all_ms": {way: [round(value * 1e3, 3) for value in values] for way, values in medians.items()},
        "over_alone": {way: round(statistics.median(values) / base - 1, 4) for way, values in medians.items()},
    }


def startup() -> dict[str, str]:
    """The path on which Python finds the door, where ligerprof is not installed with its .pth file."""
    folder = HERE.parent / "ligerprof" / "runs" / "recording" / "startup"
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--only", help="names of scripts, joined by commas; default: all")
    parser.add_argument("--overhead", default="", help="names of scripts to time")
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE.parent), os.environ.get("PYTHONPATH"))))
    names = arguments.only.split(",") if arguments.only else sorted(path.stem for path in SCRIPTS.glob("*.py"))
    results: dict[str, Any] = {"scripts": [], "overhead": []}
    scratch = arguments.output / "scratch"
    for kind, function, chosen in (
        ("scripts", lambda script: check(script, scratch), names),
        ("overhead", lambda script: overhead(script, scratch, arguments.turns), arguments.overhead.split(",")),
    ):
        for name in filter(None, chosen):
            scratch.mkdir(exist_ok=True)
            try:
                found = function(SCRIPTS / f"{name}.py")
            except Exception as error:  # one script must not end the others
                found = {"script": name, "error": f"{type(error).__name__}: {error}"[-1500:]}
            results[kind].append(found)
            print(json.dumps(found)[:1500], flush=True)
            (arguments.output / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
