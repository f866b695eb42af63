"""Compare simulation and GPU just below and just above the smallest memory limit at which a step runs.

    python benchmarks/borders.py draw --seed 3 --count 20 benchmarks/results/borders-h200.jsonl
    python benchmarks/borders.py measure benchmarks/results/borders-h200.jsonl

`draw` does not require a GPU: it draws recipes as accuracy.py does, finds the smallest limit of each by simulation, and
writes two cases, 1.5 % below and 1.5 % above it. `measure` runs them on a GPU and prints how often both agree.
"""

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from accuracy import AT_ONCE, SHARED_BYTES, Budget, draws, recipe_of, run_step

from ligerprof.recipe.training import TrainingRecipe
from ligerprof.units import GIB

MARGIN = 0.015
PRECISION = 0.002


def fits(options: dict[str, Any], limit_bytes: int) -> bool:
    from ligerprof.runs.simulated import simulate_step

    limited = recipe_of({**options, "memory_limit_bytes": limit_bytes})
    return simulate_step(limited, record=False).oom is None


def smallest_limit(recipe: TrainingRecipe, options: dict[str, Any]) -> int:
    from ligerprof.runs.simulated import simulate_step

    free = simulate_step(recipe, record=False)
    fails = max(free.peak_bytes, free.first_step_peak_bytes)
    holds = max(free.reserved_bytes, free.first_step_reserved_bytes)
    while holds - fails > PRECISION * holds:
        middle = (holds + fails) // 2
        if fits(options, middle):
            holds = middle
        else:
            fails = middle
    return holds


def draw_questions(results: Path, seed: int, count: int) -> None:
    for number, options in enumerate(draws(seed, count)):
        recipe = recipe_of(options)
        limit_bytes = smallest_limit(recipe, options)
        with results.open("a") as lines:
            for side in (1 - MARGIN, 1 + MARGIN):
                asked = int(limit_bytes * side)
                row = {"seed": seed, "number": number, "options": options, "memory_limit_bytes": asked}
                row |= {"smallest_limit_bytes": limit_bytes, "simulated_fits": fits(options, asked)}
                lines.write(json.dumps(row) + "\n")
        print(number, limit_bytes, file=sys.stderr, flush=True)


def measure(results: Path) -> None:
    budget = Budget(SHARED_BYTES)

    def ask(line: str) -> dict[str, Any]:
        row = json.loads(line)
        size_bytes = row["memory_limit_bytes"] + 2 * GIB
        budget.take(size_bytes)
        try:
            outcome = run_step({**row["options"], "memory_limit": row["memory_limit_bytes"]})
        finally:
            budget.give_back(size_bytes)
        return {**row, **outcome, "measured_fits": "failed" not in outcome and outcome["oom"] is None}

    with ThreadPoolExecutor(AT_ONCE) as pool:
        rows = list(pool.map(ask, results.read_text().splitlines()))
    results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    agreeing = sum(row["simulated_fits"] == row["measured_fits"] for row in rows)
    for row in rows:
        if row["simulated_fits"] != row["measured_fits"] or "failed" in row:
            print("differs:", {key: row[key] for key in row if key not in ("snapshot", "phases", "versions")})
    print(f"{agreeing} of {len(rows)} verdicts agree")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("draw", "measure"))
    parser.add_argument("results", type=Path)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--count", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.what == "draw":
        draw_questions(arguments.results, arguments.seed, arguments.count)
    else:
        measure(arguments.results)


if __name__ == "__main__":
    main()
