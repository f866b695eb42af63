"""The measured rows of two GPUs, run again without one: the program that trained them as ranks on simulated GPUs.

    python benchmarks/two_gpu_rows.py simulate build/rows.jsonl [--only zero,ranks-19] [--at-once 4] [--seconds 500]
    python benchmarks/two_gpu_rows.py table build/rows.jsonl

The program is `ranks.py rank` under torchrun. Rows that began with memory of others in the same process, which went at
some time, are left out: `ddp-alone` has the same recipes alone. So are rows that the file has, and those that fail,
which the output names. Six of ZeRO's rows were measured by the program itself (`zero-programs`), the others by
`ligerprof step`, which builds and trains the same. In some of DDP's rows, NCCL's watchdog let go of the first buckets
before the second step: there the program pauses after each step, so that the simulated watchdog comes first, too
(`pause`).
"""

import argparse
import datetime as dt
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ranks import described

from ligerprof.recipe.training import TrainingRecipe

HERE = Path(__file__).parent
# of rows with one recipe, the first counts
SOURCES = ("ranks", "ddp-alone", "ranks-recomputation", "zero-programs", "zero")
RANKS = 2
# seconds; longer than the watchdog's turns
PAUSE = 0.2


def measured_rows() -> Iterator[tuple[str, dict[str, Any], list[list[list[int | None]]]]]:
    """Name, recipe, and of each rank the [peak, reserved] bytes of the first steps."""
    seen = set()
    for source in SOURCES:
        name = f"{source}-h200" if source == "zero" else f"{source}-h200x2"
        for number, line in enumerate((HERE / "results" / f"{name}.jsonl").read_text().splitlines()):
            row = json.loads(line)
            if row.get("kind", "row") != "row" or row["recipe"]["gpus"] != RANKS:
                continue
            if any(rank.get("base_bytes") for rank in row["ranks"]):
                continue
            recipe = described(TrainingRecipe.from_json(row["recipe"]))
            if source.startswith("zero") and recipe in seen:
                continue
            seen.add(recipe)
            yield f"{source}-{number}", row["recipe"], [steps_of(rank, row) for rank in row["ranks"]]


def steps_of(rank: dict[str, Any], row: dict[str, Any]) -> list[list[int | None]]:
    if "peaks" not in rank:
        # of a measured step, which has the peak of its first step for the worst rank alone
        first = rank.get("first_step_peak_bytes")
        return [[first, None], [rank["peak_bytes"], rank["reserved_bytes"]]]
    steps = [list(step) for step in zip(rank["peaks"], rank["reserved"], strict=True)]
    return steps[: row["recipe"]["warmup"] + 1]


def simulated(recipe: dict[str, Any], seconds: float, pause: float = 0) -> dict[str, Any]:
    program = [str(HERE / "ranks.py"), "rank", "-", f"--gpus={RANKS}", "--parts=rows", "--recipe", json.dumps(recipe)]
    program += [f"--pause={pause}"] if pause else []
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", *program]
    with tempfile.TemporaryDirectory() as folder:
        run = ["run", "--device", "simulated", "--gpu", "h200", "--json", "-o", f"{folder}/run", "--", *launch]
        command = [sys.executable, "-m", "ligerprof", *run]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            return {"problem": f"over {seconds:.0f} s"}
    for line in done.stderr.splitlines():
        if line.startswith('{"kind": "row"'):
            row = json.loads(line)
            return {"ranks": [steps_of(rank, row) for rank in row["ranks"]], "versions": row["versions"]}
    problems = [line for line in done.stderr.splitlines() if "rror" in line or line.startswith("ligerprof:")]
    return {"problem": (problems or ["no row"])[-1][-300:]}


def simulate(file: Path, only: str, at_once: int, seconds: float) -> None:
    wanted = tuple(f"{name}-" for name in only.split(",")) if only else ""
    done = {json.loads(line)["name"] for line in file.read_text().splitlines()} if file.exists() else set()
    end = time.monotonic() + seconds

    def work(name: str, recipe: dict[str, Any], measured: list[list[list[int | None]]]) -> None:
        began = time.monotonic()
        if end - began < 20:
            return
        row = {"name": name, "recipe": described(TrainingRecipe.from_json(recipe)), "measured": measured}
        row |= simulated(recipe, end - began)
        if watchdog_came_first(row):
            row |= simulated(recipe, end - time.monotonic(), PAUSE) | {"pause": PAUSE}
        row["seconds"] = round(time.monotonic() - began, 1)
        if "problem" in row:
            print(name, row["seconds"], row["problem"], flush=True)
            return
        row["date"] = dt.datetime.now(dt.UTC).date().isoformat()
        with file.open("a") as lines:
            print(json.dumps(row), file=lines, flush=True)
        print(name, row["seconds"], errors_of(row), flush=True)

    with ThreadPoolExecutor(at_once) as pool:
        rows = [row for row in measured_rows() if row[0] not in done and f"{row[0]}-".startswith(wanted)]
        for each in [pool.submit(work, *row) for row in rows]:
            each.result()


def errors_of(row: dict[str, Any]) -> list[tuple[str, float]]:
    """Relative errors of what was measured: `first`, `steady` and `reserved`."""
    found = []
    for ours, theirs in zip(row["ranks"], row["measured"], strict=True):
        pairs = {"first": (ours[0][0], theirs[0][0]), "steady": (ours[-1][0], theirs[-1][0])}
        pairs["reserved"] = (ours[-1][1], theirs[-1][1])
        found += [(name, mine / true - 1) for name, (mine, true) in pairs.items() if true]
    return found


def watchdog_came_first(row: dict[str, Any]) -> bool:
    """Whether the second step, in which DDP makes its buckets anew, had no first ones any more on the GPUs."""
    pairs = zip(row.get("ranks", ()), row["measured"], strict=False)
    return row["recipe"].startswith("ddp") and any(ours[1][0] > 1.005 * theirs[1][0] for ours, theirs in pairs)


def table(file: Path) -> None:
    """Prints Markdown: a row for each recipe with the errors of its worst rank, then medians and worst."""
    together: dict[str, list[float]] = {}
    print("| recipe | first step | later steps | reserved |\n|---|---:|---:|---:|")
    for row in map(json.loads, file.read_text().splitlines()):
        worst: dict[str, float] = {}
        for name, error in errors_of(row):
            together.setdefault(name, []).append(abs(error))
            worst[name] = max(worst.get(name, 0.0), error, key=abs)
        cells = [
            f"{worst[name]:+.3%}".replace("%", " %") if name in worst else ""
            for name in ("first", "steady", "reserved")
        ]
        print(f"| {row['recipe']} | {' | '.join(cells)} |")
    for name, values in together.items():
        print(f"{name}: median {statistics.median(values):.3%}, worst {max(values):.3%} of {len(values)} ranks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("simulate", "table"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="names of rows, or of the files that have them; default: all")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3600)
    options = parser.parse_args()
    if options.action == "table":
        table(options.file)
    else:
        simulate(options.file, options.only, options.at_once, options.seconds)


if __name__ == "__main__":
    main()
