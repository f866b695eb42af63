"""Compare estimates of models whose architectures or classes have no row with their simulated steps.

Each small model is traced once per precision at 2 x 256 tokens, and estimated at sizes that were not traced. One line
per step: the simulated peak, and how far the estimate is from it, in percent; the same for reserved bytes.

Run from the repository root: python -m benchmarks.traced_models [--family NAME]
"""

import argparse
import time
from typing import Any

from ligerprof.analyzers.estimate import estimate
from ligerprof.errors import LigerprofError
from ligerprof.runs.simulated import simulate_step
from ligerprof.runs.tapes.recipes import Way, to_trace, with_tape_of
from ligerprof.runs.tapes.traced import trace_tape
from tests.traced_models import CLASSES, CONFIGS, recipe_of

STEPS: dict[str, dict[str, Any]] = {
    "3 x 384, checkpointed": {"batch": 3, "seq": 384},
    "5 x 640": {"batch": 5, "seq": 640, "checkpointing": False},
}


def compare(family: str, precision: str) -> None:
    """Print a line per step of one model."""
    start = time.monotonic()
    try:
        tape = trace_tape(to_trace(recipe_of(family, precision=precision)), Way.UNITS)
    except LigerprofError as error:
        print(f"{family:34} {precision:5} {error}", flush=True)
        return
    seconds = time.monotonic() - start
    for title, options in STEPS.items():
        recipe = recipe_of(family, precision=precision, **options)
        if not tape.covers(recipe.rows, recipe.row_tokens):
            print(f"{family:34} {precision:5} {title:22} the tape holds for one size", flush=True)
            continue
        try:
            simulated = simulate_step(recipe, record=False)
        except LigerprofError as error:
            print(f"{family:34} {precision:5} {title:22} {error}", flush=True)
            continue
        estimated = estimate(with_tape_of(recipe, tape))
        peak = 100 * (estimated.peak_bytes / simulated.peak_bytes - 1)
        reserved = 100 * (estimated.run.reserved_bytes / simulated.reserved_bytes - 1)
        print(
            f"{family:34} {precision:5} {title:22} {simulated.peak_bytes:>14,} {peak:+.4f} %"
            f"  reserved {simulated.reserved_bytes:>14,} {reserved:+.2f} %  traced in {seconds:.0f} s",
            flush=True,
        )


def main() -> None:
    """Print the lines of all models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", action="append", choices=[*CONFIGS, *CLASSES], help="Only these architectures.")
    for family in parser.parse_args().family or [*CONFIGS, *CLASSES]:
        for precision in ("bf16", "amp"):
            compare(family, precision)


if __name__ == "__main__":
    main()
