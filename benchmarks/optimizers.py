"""Measure a step of each optimizer, with fp32 weights and with bf16 weights under autocast; score as accuracy.py does.

    python benchmarks/optimizers.py measure RESULTS.jsonl   # on a GPU; bitsandbytes for Lion, 8-bit and paged AdamW
    python benchmarks/optimizers.py score RESULTS.jsonl     # anywhere

Few tokens, so that the optimizer determines the peak.
"""

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from accuracy import run_step, score

AT_ONCE = 3
NAMES = (
    "adamw-fused",
    "adamw-foreach",
    "adamw",
    "adafactor",
    "muon",
    "sgd",
    "adamw-8bit",
    "paged-adamw",
    "paged-adamw-8bit",
    "lion",
)
RECIPES: tuple[dict[str, Any], ...] = tuple(
    {"model": "llama3.2-1b", "batch": 1, "seq": 128, "precision": precision, "optimizer": name}
    for name in NAMES
    for precision in ("amp", "bf16-amp")
)


def measure(results: Path) -> None:
    def run(numbered: tuple[int, dict[str, Any]]) -> dict[str, Any]:
        number, options = numbered
        return {"seed": 0, "number": number, "options": options, **run_step(options)}

    with ThreadPoolExecutor(AT_ONCE) as pool:
        rows = list(pool.map(run, enumerate(RECIPES)))
    results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for row in rows:
        print(row["options"], row.get("peak_bytes"), row.get("failed", ""), file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("measure", "score"))
    parser.add_argument("results", type=Path)
    arguments = parser.parse_args()
    (measure if arguments.action == "measure" else score)(arguments.results)


if __name__ == "__main__":
    main()
