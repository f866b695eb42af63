"""Simulate every measured step of tests/data/truth and print how far off the simulation is.

Run from the repository root: python benchmarks/simulate_truth.py [--only WORD] [--jsonl FILE]
"""

import argparse
import json
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRUTH_DIR = Path(__file__).resolve().parent.parent / "tests" / "data" / "truth"
STEPS_FILE = TRUTH_DIR / "h200-steps.jsonl"


@dataclass(frozen=True, kw_only=True)
class Score:
    """One measured row and its simulation."""

    row: dict[str, Any]
    peak_bytes: int
    reserved_bytes: int
    first_step_peak_bytes: int
    phases: dict[str, int]
    seconds: float

    @property
    def peak_error(self) -> float:
        return self.peak_bytes / self.row["peak_bytes"] - 1

    @property
    def reserved_error(self) -> float:
        return self.reserved_bytes / self.row["reserved_bytes"] - 1

    @property
    def phase_errors(self) -> dict[str, float]:
        return {name: self.phases[name] / measured - 1 for name, measured in self.row["phases"].items()}


def measured_rows(path: Path = STEPS_FILE) -> list[dict[str, Any]]:
    """The measured steps, one dict each."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def row_name(row: dict[str, Any]) -> str:
    """A short name of a row for tables and test ids."""
    parts = [
        row["model"],
        row["precision"],
        row["attention"],
        "ckpt" if row["checkpointing"] else "whole",
        row["optimizer"],
        f"{row['batch']}x{row['seq']}",
    ]
    if row["provider"]:
        parts.append(f"{row['provider']}-{row['liger']}")
    if row["loss"] != "hf":
        parts.append(row["loss"])
    if row["library_workspace_at_start_bytes"] == 0:
        parts.append("fresh")
    return " ".join(parts)


def recipe_options(row: dict[str, Any]) -> dict[str, Any]:
    """The row as TrainingRecipe's arguments."""
    names = ("loss", "precision", "checkpointing", "optimizer", "attention", "batch", "seq", "liger")
    options = {name: row[name] for name in names}
    options["model"] = str(TRUTH_DIR / "odd-llama") if row["model"] == "odd" else row["model"]
    options["provider"] = row["provider"] or "ligerprof"
    return options


def score(row: dict[str, Any]) -> Score:
    """Simulate one row."""
    from ligerprof.recipe import TrainingRecipe
    from ligerprof.runs.simulated import simulate_step

    started = time.perf_counter()
    outcome = simulate_step(TrainingRecipe(**recipe_options(row)), record=False)
    return Score(
        row=row,
        peak_bytes=outcome.peak_bytes,
        reserved_bytes=outcome.reserved_bytes,
        first_step_peak_bytes=outcome.first_step_peak_bytes,
        phases={phase.value: size_bytes for phase, size_bytes in outcome.phases.items()},
        seconds=time.perf_counter() - started,
    )


def table(scores: list[Score]) -> Iterator[str]:
    """Rows of a Markdown table."""
    yield "| step | measured peak, MiB | simulated | error % | worst phase % | reserved error % | first step % | s |"
    yield "|---|---|---|---|---|---|---|---|"
    for item in scores:
        worst = max(item.phase_errors.values(), key=abs)
        first = item.first_step_peak_bytes / item.row["first_step_peak_bytes"] - 1
        yield (
            f"| {row_name(item.row)} | {item.row['peak_bytes'] / 2**20:,.1f} | {item.peak_bytes / 2**20:,.1f}"
            f" | {item.peak_error:+.4%} | {worst:+.4%} | {item.reserved_error:+.2%} | {first:+.4%}"
            f" | {item.seconds:.1f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="score rows whose name holds this word")
    parser.add_argument("--jsonl", type=Path, default=STEPS_FILE, help="measured steps")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    scores = [score(row) for row in measured_rows(arguments.jsonl) if arguments.only in row_name(row)]
    print("\n".join(table(scores)))


if __name__ == "__main__":
    main()
