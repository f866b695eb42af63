"""Measure steps under FSDP1 as one rank of eight, alone on one GPU, and compare them with their estimates.

    python benchmarks/fsdp1.py measure build/fsdp1.jsonl       # needs one GPU
    python benchmarks/fsdp1.py compare benchmarks/results/fsdp1-alone-h200.jsonl

The collectives of torch's fake process group send nothing, and take what real ones take in torch's allocator.
"""

import dataclasses
import datetime as dt
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

from ligerprof.analyzers.estimate import estimate
from ligerprof.recipe.training import TrainingRecipe

WORLD = 8
BASE = {"engine": "fsdp1", "gpus": WORLD, "precision": "mixed", "repeats": 1, "warmup": 1}
RECIPES: tuple[dict[str, Any], ...] = (
    {"model": "llama3.2-1b", "batch": 4, "clip": 1.0},
    {"model": "llama3.2-1b", "batch": 2, "precision": "bf16", "reshard": False, "grad_accum": 2},
    {"model": "qwen3-0.6b", "batch": 4, "checkpointing": False, "backward_prefetch": "none"},
    {"model": "qwen2.5-0.5b", "batch": 4, "grad_accum": 3, "grad_sync": "every", "reduce_dtype": "bfloat16"},
    {"model": "qwen3-1.7b", "batch": 2, "liger": "all", "backward_prefetch": "post"},
)


def measure_alone(options: dict[str, Any]) -> dict[str, Any]:
    """One step, in a process of its own."""
    import torch
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from ligerprof.recipe.categories import Engine
    from ligerprof.runs.measured.ranks import engine_of
    from ligerprof.runs.measured.step import measure_step

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    recipe = TrainingRecipe(**{**BASE, **options})
    build, _ = engine_of(Engine.FSDP1)
    outcome = measure_step(recipe, trace_directory=None, progress=lambda _text: None, build=build)
    versions = {"torch": torch.__version__, **outcome.versions}
    figures = {name: getattr(outcome, name) for name in ("peak_bytes", "first_step_peak_bytes", "reserved_bytes")}
    return {"recipe": recipe.to_json(), **figures, "gpu": outcome.gpu, "versions": versions, "world": WORLD}


def measure(path: Path) -> None:
    """Append a row per recipe."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as processes, path.open("a") as file:
        for options in RECIPES:
            row = processes.apply(measure_alone, (options,))
            file.write(json.dumps({**row, "date": dt.date.today().isoformat()}) + "\n")
            file.flush()
            print(compared(row), flush=True)


def compared(row: dict[str, Any]) -> str:
    """The errors of the estimate of steps, without a save of the whole model, in percent."""
    estimated = estimate(dataclasses.replace(TrainingRecipe.from_json(row["recipe"]), save_whole=False))
    names = ("peak_bytes", "first_step_peak_bytes", "reserved_bytes")
    errors = (f"{name} {100 * (getattr(estimated, name) / row[name] - 1):+.3f} %" for name in names)
    return f"{estimated.recipe.summary}: {', '.join(errors)}"


if __name__ == "__main__":
    action, file = sys.argv[1], Path(sys.argv[2])
    if action == "measure":
        measure(file)
    else:
        for line in file.read_text(encoding="utf-8").splitlines():
            print(compared(json.loads(line)))
