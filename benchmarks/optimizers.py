"""Measure a step of each optimizer, with fp32 weights and with bf16 weights under autocast; score as accuracy.py does.

    python benchmarks/optimizers.py measure RESULTS.jsonl   # on a GPU; bitsandbytes for Lion, 8-bit and paged AdamW
    python benchmarks/optimizers.py score RESULTS.jsonl     # anywhere

Few tokens, so that the optimizer determines the peak.
"""

from typing import Any

from accuracy import measure_or_score

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


if __name__ == "__main__":
    measure_or_score(RECIPES, at_once=AT_ONCE, description=__doc__)
