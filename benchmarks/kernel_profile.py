"""Where the GPU's time goes, kernel by kernel: in a training step under each kernel set, and in the fused loss.

    python benchmarks/kernel_profile.py measure benchmarks/results/kernel-profile-h200.jsonl
    python benchmarks/kernel_profile.py table benchmarks/results/kernel-profile-h200.jsonl

`measure` requires a GPU and a minute; it appends one JSON line per step and per loss. Times are those of torch's
profiler.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from step_turns import CANDIDATES, SETTINGS, Cell, candidate_recipe, device_timeline, kernels_in

from ligerprof.errors import LigerprofError
from ligerprof.recipe.training import TrainingRecipe

# one of a step's kinds, by parts of kernels' names; the first match counts
KINDS = {
    "products": ("gemm", "nvjet", "cutlass", "xmma", "splitk", "cublas"),
    "attention": ("flash", "fmha", "sdpa", "cudnn"),
    "optimizer": ("multi_tensor", "adam", "foreach"),
    "head": (
        "cross_entropy",
        "_block_",
        "_split_row",
        "_total_kernel",
        "_scale_kernel",
        "element_mul",
        "reciprocal_count",
    ),
    "norms": ("norm", "rms", "_column_sums"),
    "gate": ("glu", "silu", "gelu", "_gated"),
    "additions": ("cudafunctor_add",),
    "rope": ("rope", "rotary"),
    "copies": ("memcpy", "memset", "copy", "cat"),
}
# attention kernels are made of products, and are named so
FIRST = ("attention", "optimizer")
STEP_MODELS = ("mistral-7b-v0.3", "llama3.1-8b", "llama3.2-1b")
LOSSES = (
    (16384, 2304, 256000, "balanced"),
    (4096, 2048, 128256, "balanced"),
    (2048, 2048, 128256, "lean"),
)
STEPS = 3
# the longest gaps between kernels that are recorded
GAPS = 12
WHAT = ("losses", "steps")


def kind_of(name: str) -> str:
    lowered = name.lower()
    for kind in (*FIRST, *KINDS):
        if any(part in lowered for part in KINDS[kind]):
            return kind
    return "other"


def profiled(run: Callable[[], object], runs: int) -> dict[str, Any]:
    """Milliseconds of one run: on the clock, from the first kernel's start to the last one's end, and of each kernel.

    The clock's is without the profiler, the others with it.
    """
    import torch

    def repeat() -> None:
        for _ in range(runs):
            run()
        torch.cuda.synchronize()

    repeat()
    started = time.perf_counter()
    repeat()
    wall_ms = 1e3 * (time.perf_counter() - started) / runs
    timeline = device_timeline(run, runs)
    rows = [
        {"kernel": name, "ms": 1e3 * seconds, "launches": launches}
        for name, (seconds, launches) in sorted(timeline.kernels.items(), key=lambda item: -item[1][0])
    ]
    longest = sorted(timeline.gaps.items(), key=lambda item: -item[1])[:GAPS]
    gaps = [{"before": before, "after": after, "ms": 1e3 * seconds} for (before, after), seconds in longest]
    return {"wall_ms": wall_ms, "profiled_ms": 1e3 * timeline.seconds, "kernels": rows, "gaps": gaps}


def profile_steps(base: TrainingRecipe) -> Iterator[dict[str, Any]]:
    import torch

    from ligerprof.runs.training import built_model

    torch.manual_seed(0)
    with built_model(base, torch.device("cuda", torch.cuda.current_device())) as model:
        cell = Cell(base, model)
        for name in CANDIDATES:
            if name.endswith("auto"):
                continue
            try:
                with kernels_in(model, candidate_recipe(base, name)):
                    cell.step()
                    found = profiled(cell.step, STEPS)
            except LigerprofError as error:  # the provider is not installed
                print(f"{base.spec.name}, {name}: {error}", file=sys.stderr)
                continue
            yield {"kind": "step", "recipe": base.to_json(), "candidate": name, **found}


def profile_loss(tokens: int, hidden: int, vocab: int, budget: str) -> dict[str, Any]:
    import torch
    from head_grid import bench_shape

    from ligerprof.runs.bench.accuracy import BoundCall, make_tensors
    from ligerprof.runs.bench.operations import OPERATIONS, Maker, find_provided

    operation, shape = OPERATIONS["flce"], bench_shape((tokens, hidden, vocab))
    generator = torch.Generator("cuda").manual_seed(0)
    tensors = make_tensors(operation, shape, Maker(dtype=torch.bfloat16, generator=generator))
    (provided,), _ = find_provided("flce", (f"ligerprof:{budget}",), "cuda")
    sizes = {"tokens": tokens, "hidden": hidden, "vocab": vocab, "budget": budget}
    return {"kind": "loss", **sizes, **profiled(BoundCall(operation, provided, tensors).full, 10)}


def measure(results: Path, what: Sequence[str], models: Sequence[str]) -> None:
    import torch

    from ligerprof.runs.outcome import package_versions

    common = {
        "schema": 1,
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": dict(package_versions()),
    }

    def rows() -> Iterator[dict[str, Any]]:
        for sizes in LOSSES if "losses" in what else ():
            yield profile_loss(*sizes)
        for setting in SETTINGS:
            if "steps" in what and setting.model in models:
                yield from profile_steps(setting.recipe())
                gc.collect()
                torch.cuda.empty_cache()

    results.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    for row in rows():
        with results.open("a") as lines:
            lines.write(json.dumps({**common, **row}) + "\n")
        print(f"{name_of(row)}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def name_of(row: dict[str, Any]) -> str:
    if row["kind"] == "step":
        recipe = row["recipe"]
        return f"{recipe['model']} {recipe['batch']} x {recipe['seq']}, {row['candidate']}"
    return f"loss of {row['tokens']} x {row['hidden']} x {row['vocab']}, {row['budget']}"


def table_rows(results: Path) -> Iterator[str]:
    """One row per step or loss: the clock's time, the kernels' time, each kind's, and launches."""
    kinds = [*KINDS, "other"]
    yield f"| | clock, ms | profiled | kernels | launches | {' | '.join(kinds)} |"
    yield f"|---|---:|---:|---:|---:|{'---:|' * len(kinds)}"
    for line in results.read_text().splitlines():
        row = json.loads(line)
        of_kind = dict.fromkeys(kinds, 0.0)
        for kernel in row["kernels"]:
            of_kind[kind_of(kernel["kernel"])] += kernel["ms"]
        launches = sum(kernel["launches"] for kernel in row["kernels"])
        cells = " | ".join(f"{ms:.2f}" for ms in of_kind.values())
        total = sum(of_kind.values())
        # files from before it was recorded have none
        profiled_ms = f"{row['profiled_ms']:.2f}" if "profiled_ms" in row else "-"
        yield f"| {name_of(row)} | {row['wall_ms']:.2f} | {profiled_ms} | {total:.2f} | {launches:.0f} | {cells} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "table"))
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", choices=WHAT, help="measure these alone")
    parser.add_argument("--models", default=",".join(STEP_MODELS), help="models of the steps (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.what == "measure":
        what = WHAT if arguments.only is None else (arguments.only,)
        measure(arguments.results, what, arguments.models.split(","))
    for row in table_rows(arguments.results):
        print(row)


if __name__ == "__main__":
    main()
