"""Compare what `ligerprof explain` suggests with what each suggestion achieves, program by program.

    python benchmarks/suggestions.py build/suggestions.jsonl
    python benchmarks/suggestions.py build/suggestions.jsonl --only trainer fsdp2 --keep build/recordings

Requires a CUDA GPU. Each program of `suggestion_programs.py` is recorded and explained; each suggestion is then made in
the program, which runs again without a recording. One JSON line per suggestion: the predicted and the achieved lowering
of max_memory_allocated in bytes, their ratio less 1, and the peak of each step, those of the recorded program first.
Programs whose packages are missing give a line with the reason. Lines that the file already has are not measured again.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

from ligerprof.analyzers.explain.analysis import explain
from ligerprof.analyzers.suggestions.suggestion import Suggestion

PROGRAMS = (
    "torch-loop",
    "torch-small-batch",
    "torch-late-zero",
    "transformers-loop",
    "transformers-eager",
    "trainer",
    "trainer-checkpointed",
    "accelerate-loop",
    "ddp",
    "ddp-small-batch",
    "fsdp2",
    "deepspeed-2",
    "deepspeed-3",
)
_SCRIPT = Path(__file__).with_name("suggestion_programs.py")
_REASON_CHARACTERS = 300
_LONGEST_RUN_SECONDS = 300


def run(program: str, folder: Path, *, change: str = "", record: Path | None = None) -> dict[str, Any]:
    """Run a program in a process of its own; the figures that it writes, or the reason for none."""
    result = folder / f"{program}-{change or 'unchanged'}.json"
    command = [sys.executable, str(_SCRIPT), program, str(result), "--change", change]
    if record is not None:
        command += ["--record", str(record)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LONGEST_RUN_SECONDS)
    except subprocess.TimeoutExpired:
        return {"failed": f"over {_LONGEST_RUN_SECONDS} s"}
    if done.returncode or not result.is_file():
        errors = [line for line in done.stderr.splitlines() if re.match(r"[\w.]+(?:Error|Exception)\b", line)]
        # the first one is the cause of the last one
        reasons = dict.fromkeys([*errors[:1], *(errors or done.stderr.splitlines() or ["no output"])[-1:]])
        return {"failed": "; ".join(reasons)[:_REASON_CHARACTERS]}
    figures: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return figures


def compare(program: str, folder: Path, known: set[tuple[str, str]], repeats: int = 1) -> Iterator[dict[str, Any]]:
    """A row for each suggestion for a program."""
    snapshot = folder / f"{program}.pickle"
    base = run(program, folder, record=snapshot)
    if "failed" in base:
        yield {"program": program, **base}
        return
    report = explain(snapshot)
    if report.peak_bytes != base["peak_bytes"]:
        yield {"program": program, "replayed_bytes": report.peak_bytes, **base, "failed": "the replay's peak differs"}
    for suggestion in report.suggestions:
        if (program, suggestion.name) not in known:
            changed = [run(program, folder, change=suggestion.name) for _ in range(repeats)]
            yield _row(program, suggestion, base, changed)


def _row(program: str, suggestion: Suggestion, base: dict[str, Any], changed: list[dict[str, Any]]) -> dict[str, Any]:
    row = {
        "program": program,
        "suggestion": suggestion.name,
        "framework": suggestion.framework.value,
        "cost": suggestion.cost.value,
        "how": list(suggestion.how),
        "gpu": base["gpu"],
        "torch": base["torch"],
        "before_bytes": base["peak_bytes"],
        "basis": suggestion.basis.value,
        "condition": suggestion.condition,
        "predicted_saving_bytes": suggestion.saves_bytes,
    }
    failed = next((one for one in changed if "failed" in one), None)
    if failed is not None:
        return {**row, **failed}
    savings = [base["peak_bytes"] - one["peak_bytes"] for one in changed]
    achieved_bytes = savings[0]
    if len(savings) > 1:
        row["achieved_savings_bytes"] = savings
    row["step_peaks_bytes"] = [base["step_peaks_bytes"], *(one["step_peaks_bytes"] for one in changed)]
    ratio = (
        suggestion.saves_bytes / achieved_bytes - 1 if suggestion.saves_bytes is not None and achieved_bytes else None
    )
    return {**row, "achieved_saving_bytes": achieved_bytes, "error_ratio": None if ratio is None else round(ratio, 4)}


def main() -> None:
    """Measure the programs, several at a time: their peaks do not depend on each other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=PROGRAMS)
    parser.add_argument("--keep", type=Path, help="Folder for the recordings. Default: next to the output.")
    parser.add_argument("--jobs", type=int, default=4, help="Programs at a time.")
    parser.add_argument("--repeats", type=int, default=1, help="Runs of each changed program; the first one counts.")
    options = parser.parse_args()
    folder = options.keep or options.output.parent / "suggestions"
    folder.mkdir(parents=True, exist_ok=True)
    lines = options.output.read_text(encoding="utf-8").splitlines() if options.output.is_file() else []
    known = {(row["program"], row["suggestion"]) for row in map(json.loads, lines) if "achieved_saving_bytes" in row}
    lock = Lock()
    with options.output.open("a", encoding="utf-8") as output, ThreadPoolExecutor(options.jobs) as pool:

        def measure(program: str) -> None:
            # each line is written as soon as it is known, so that a run that is cut short keeps it
            for row in compare(program, folder, known, options.repeats):
                with lock:
                    output.write(json.dumps(row) + "\n")
                    output.flush()
                    achieved = row.get("achieved_saving_bytes", row.get("failed"))
                    print(program, row.get("suggestion"), row.get("predicted_saving_bytes"), achieved, flush=True)

        list(pool.map(measure, options.only))


if __name__ == "__main__":
    main()
