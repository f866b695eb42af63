"""Compare what `ligerprof explain` suggests with what each suggestion achieves, program by program.

    python benchmarks/suggestions.py build/suggestions.jsonl
    python benchmarks/suggestions.py build/suggestions.jsonl --only trainer fsdp2 --keep build/recordings
    python benchmarks/suggestions.py build/two.jsonl --only ddp-two-ranks --changes shard-model shard-optimizer

Requires a CUDA GPU; programs named `two-ranks` require two. Each program of `suggestion_programs.py` is recorded and
explained; each suggestion is then made in the program, which runs again without a recording. One JSON line per
suggestion: the predicted and the achieved lowering of max_memory_allocated in bytes, their ratio less 1, and the peak
of each step, those of the recorded program first.
Programs whose packages are missing give a line with the reason. Lines that the file already has are not measured again.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

from ligerprof.analyzers.explain.analysis import explain
from ligerprof.analyzers.suggestions.rows import Suggestion

PROGRAMS = (
    "torch-loop",
    "torch-small-batch",
    "torch-late-zero",
    "transformers-loop",
    "transformers-eager",
    "trainer",
    "trainer-checkpointed",
    "trainer-small-batch",
    "trainer-evaluating",
    "trainer-accumulating",
    "trainer-bf16",
    "trainer-autocast-checkpointed",
    "sft-loop",
    "torch-kept-outputs",
    "generation",
    "accelerate-loop",
    "ddp",
    "ddp-small-batch",
    "fsdp2",
    "deepspeed-2",
    "deepspeed-3",
    "ddp-two-ranks",
    "ddp-two-ranks-small-batch",
    "deepspeed-2-two-ranks",
)
# on two GPUs; the others need one
_TWO_RANKS = tuple(name for name in PROGRAMS if "two-ranks" in name)
_SCRIPT = Path(__file__).with_name("suggestion_programs.py")
_REASON_CHARACTERS = 300
_LONGEST_RUN_SECONDS = 300


def run(program: str, folder: Path, *, change: str = "", record: Path | None = None) -> dict[str, Any]:
    """Run a program in a process of its own; the figures that it writes, or the reason for none."""
    result = folder / f"{program}-{change or 'unchanged'}.json"
    command = [sys.executable, str(_SCRIPT), program, str(result), "--change", change]
    if record is not None:
        command += ["--record", str(record)]
    if program in _TWO_RANKS:
        command[1:1] = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
        command[5:5] = ["--rdzv-endpoint=127.0.0.1:0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LONGEST_RUN_SECONDS)
    except subprocess.TimeoutExpired:
        return {"failed": f"over {_LONGEST_RUN_SECONDS} s"}
    if done.returncode or not result.is_file():
        lines = [line.removeprefix("[rank0]: ") for line in done.stderr.splitlines()]
        errors = [line for line in lines if re.match(r"[\w.]+(?:Error|Exception)\b", line)]
        # the first one is the cause of the last one
        reasons = dict.fromkeys([*errors[:1], *(errors or lines or ["no output"])[-1:]])
        return {"failed": "; ".join(reasons)[:_REASON_CHARACTERS]}
    figures: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return figures


def compare(
    program: str, folder: Path, known: set[tuple[str, str]], *, repeats: int = 1, changes: Sequence[str] | None = None
) -> Iterator[dict[str, Any]]:
    """A row for each suggestion for a program, or for the given changes, suggested or not."""
    snapshot = folder / f"{program}.pickle"
    base = run(program, folder, record=snapshot)
    if "failed" in base:
        yield {"program": program, **base}
        return
    report = explain(snapshot)
    if report.peak_bytes != base["peak_bytes"]:
        yield {"program": program, "replayed_bytes": report.peak_bytes, **base, "failed": "the replay's peak differs"}
    suggested = {suggestion.name: suggestion for suggestion in report.suggestions}
    for name in suggested if changes is None else changes:
        if (program, name) not in known:
            changed = [run(program, folder, change=name) for _ in range(repeats)]
            yield _row(program, name, suggested.get(name), base, changed)


def _row(
    program: str, name: str, suggestion: Suggestion | None, base: dict[str, Any], changed: list[dict[str, Any]]
) -> dict[str, Any]:
    row: dict[str, Any] = {"program": program, "suggestion": name}
    row |= {"gpu": base["gpu"], "torch": base["torch"], "before_bytes": base["peak_bytes"]}
    predicted_bytes = None
    if suggestion is not None:
        predicted_bytes = suggestion.saves_bytes
        row |= {"framework": suggestion.framework.value, "cost": suggestion.cost.value, "how": list(suggestion.how)}
        row |= {"basis": suggestion.basis.value, "condition": suggestion.condition}
    row["predicted_saving_bytes"] = predicted_bytes
    failed = next((one for one in changed if "failed" in one), None)
    if failed is not None:
        return {**row, **failed}
    savings = [base["peak_bytes"] - one["peak_bytes"] for one in changed]
    achieved_bytes = savings[0]
    if len(savings) > 1:
        row["achieved_savings_bytes"] = savings
    row["step_peaks_bytes"] = [base["step_peaks_bytes"], *(one["step_peaks_bytes"] for one in changed)]
    ratio = predicted_bytes / achieved_bytes - 1 if predicted_bytes is not None and achieved_bytes else None
    if ratio is not None and suggestion is not None and suggestion.least_peak_bytes is not None:
        # of the two savings that are said, the one of this run's timing
        most_bytes = base["peak_bytes"] - suggestion.least_peak_bytes
        row["most_saving_bytes"] = most_bytes
        ratio = min(ratio, most_bytes / achieved_bytes - 1, key=abs)
    return {**row, "achieved_saving_bytes": achieved_bytes, "error_ratio": None if ratio is None else round(ratio, 4)}


def main() -> None:
    """Measure the programs, several at a time: their peaks do not depend on each other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=set(PROGRAMS) - set(_TWO_RANKS))
    parser.add_argument("--keep", type=Path, help="Folder for the recordings. Default: next to the output.")
    parser.add_argument("--jobs", type=int, default=4, help="Programs at a time.")
    parser.add_argument("--changes", nargs="+", help="Only these changes, whether they are suggested or not.")
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
            for row in compare(program, folder, known, repeats=options.repeats, changes=options.changes):
                with lock:
                    output.write(json.dumps(row) + "\n")
                    output.flush()
                    achieved = row.get("achieved_saving_bytes", row.get("failed"))
                    print(program, row.get("suggestion"), row.get("predicted_saving_bytes"), achieved, flush=True)

        list(pool.map(measure, options.only))


if __name__ == "__main__":
    main()
