"""Measure steps whose experts run one after another, and compare them with the estimates of two routings.

python benchmarks/experts_in_turn.py measure FILE.json   # on a GPU, 1 minute
python benchmarks/experts_in_turn.py compare FILE.json   # anywhere: prints the errors
"""

import json
import sys
from pathlib import Path
from typing import Any

from accuracy import run_step
from architectures import config_of, options_of

from ligerprof import TrainingRecipe, estimate
from ligerprof.models import spec_from_config

MODELS = ("mixtral", "qwen3_moe", "gpt_oss")
SETTINGS = (("bf16", True), ("amp", False))


def options(name: str, precision: str, *, checkpointing: bool) -> dict[str, Any]:
    return {**options_of(name), "experts": "eager", "precision": precision, "checkpointing": checkpointing}


def measure(path: Path) -> None:
    rows: list[dict[str, Any]] = []
    for name in MODELS:
        for precision, checkpointing in SETTINGS:
            chosen = options(name, precision, checkpointing=checkpointing)
            chosen.pop("gpu")
            step = run_step({"model": config_of(name), "device": "cuda", **chosen})
            rows.append({"model": name, "precision": precision, "checkpointing": checkpointing, **step})
            path.write_text(json.dumps(rows, indent=1) + "\n")


def compare(path: Path) -> None:
    print(
        "model, precision, checkpointing: measured bytes; estimate with tokens spread evenly, all on the same experts"
    )
    for row in json.loads(path.read_text()):
        name, chosen = row["model"], options(row["model"], row["precision"], checkpointing=row["checkpointing"])
        found = estimate(TrainingRecipe(model=spec_from_config(config_of(name), name=name), **chosen)).routing
        assert found is not None
        errors = (size_bytes / row["peak_bytes"] - 1 for size_bytes in (found.uniform_bytes, found.worst_bytes))
        print(name, row["precision"], row["checkpointing"], row["peak_bytes"], *(f"{error:+.2%}" for error in errors))


if __name__ == "__main__":
    {"measure": measure, "compare": compare}[sys.argv[1]](Path(sys.argv[2]))
