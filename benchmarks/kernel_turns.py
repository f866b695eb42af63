"""Time the kernels of another tree of this package against this tree's, in one process and in turns.

    git archive REVISION ligerprof | tar x -C /tmp/old
    python benchmarks/kernel_turns.py measure /tmp/old benchmarks/results/kernel-turns-h200.jsonl
    python benchmarks/kernel_turns.py table benchmarks/results/kernel-turns-h200.jsonl

The other tree's package is copied under another name, so that both can be imported. The trees take turns as providers
do in `ligerprof bench`: in random order, with a flush of the cache before each run. This is repeated in several series;
a tree's spread is the largest deviation of a series' median from the median of all its runs' medians. `measure`
requires a GPU and appends one JSON line per kernel, size and direction.
"""

import argparse
import dataclasses
import importlib
import json
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OLD, NEW = "ligerprof_old", "ligerprof"
# a median may exceed the old tree's median by the old tree's spread and this share
ALLOWED = 0.02
NORM_SIZES = ((8192, 4096), (4096, 2048), (8192, 8192), (4096, 16384))
LOSS_SIZES = ((4096, 2048, 128256), (16384, 2048, 128256), (8192, 4096, 128256))
# of the linear layers behind a gated activation
HIDDEN = 4096


def cases() -> Iterator[tuple[str, dict[str, int], str]]:
    """Kernel, sizes and budget of what is timed."""
    for kernel in ("rms", "add_rms", "layernorm"):
        for tokens, hidden in NORM_SIZES:
            yield kernel, {"tokens": tokens, "hidden": hidden}, ""
    yield "rope", {"tokens": 8192, "heads": 32, "kv_heads": 8, "head_dim": 128}, ""
    for kernel in ("swiglu", "geglu"):
        for columns in (4096, 14336):
            yield kernel, {"tokens": 8192, "intermediate": columns}, ""
        yield f"{kernel}_linear", {"tokens": 8192, "intermediate": 14336, "hidden": HIDDEN}, ""
    for tokens, _, vocab in LOSS_SIZES:
        yield "ce", {"tokens": tokens, "vocab": vocab}, ""
    for vocab in (50257, 32000):
        yield "ce", {"tokens": 8192, "vocab": vocab}, ""
    for budget in ("balanced", "lean"):
        for tokens, hidden, vocab in LOSS_SIZES:
            yield "flce", {"tokens": tokens, "hidden": hidden, "vocab": vocab}, budget


def import_renamed(tree: Path) -> None:
    """Make the tree's package importable as OLD."""
    folder = Path(tempfile.mkdtemp())
    shutil.copytree(tree / "ligerprof", folder / OLD)
    for path in (folder / OLD).rglob("*.py"):
        path.write_text(re.sub(r"\bligerprof\b", OLD, path.read_text()))
    sys.path.insert(0, str(folder))


def load_kernel(package: str, name: str, budget: str) -> Any:
    """A tree's kernel and options, as bench's calls take them."""
    from ligerprof.runs.bench.operations import Provided

    spec = importlib.import_module(f"{package}.kernels").find_kernel(name)
    module, _, function = spec.entry.partition(":")
    options = importlib.import_module(f"{package}.kernels.options").LossOptions
    kernel = getattr(importlib.import_module(module), function)
    return Provided(name=package, kernel=kernel, options=options(budget=budget or "balanced", in_place=True))


def find_operation(kernel: str) -> Any:
    """Bench's operation; gated activations with the linear layer are made from those without."""
    from ligerprof.runs.bench.operations import OPERATIONS

    if not kernel.endswith("_linear"):
        return OPERATIONS[kernel]
    alone = OPERATIONS[kernel.removesuffix("_linear")]

    def make(shape: Any, maker: Any) -> dict[str, Any]:
        return {**alone.make(shape, maker), "weight": maker.normal(shape.hidden, shape.intermediate, std=0.02)}

    return dataclasses.replace(
        alone,
        name=kernel,
        wants=(*alone.wants, "weight"),
        make=make,
        output_sizes=lambda shape: ((shape.sequences, shape.seq_len, shape.hidden),),
        arguments=lambda given, _options: (given["gate"], given["up"], given["weight"]),
    )


def measure_case(kernel: str, sizes: dict[str, int], budget: str, series: int) -> Iterator[dict[str, Any]]:
    import torch

    from ligerprof.runs.bench.accuracy import BoundCall, Repetitions, make_tensors, time_in_turns
    from ligerprof.runs.bench.operations import Maker
    from ligerprof.runs.bench.records import TINY, Direction
    from ligerprof.runs.bench.session import CudaClock

    device = torch.device("cuda", torch.cuda.current_device())
    known = {name: size for name, size in sizes.items() if name != "tokens"}
    shape = dataclasses.replace(TINY, name="turns", sequences=1, seq_len=sizes["tokens"], **known)
    operation = find_operation(kernel)
    maker = Maker(dtype=torch.bfloat16, generator=torch.Generator(device).manual_seed(0))
    tensors = make_tensors(operation, shape, maker)
    calls = [BoundCall(operation, load_kernel(package, kernel, budget), tensors) for package in (OLD, NEW)]
    results = [call.results() for call in calls]
    differences = [
        ((new.double() - old.double()).norm() / old.double().norm().clamp_min(1e-30)).item()
        for old, new in zip(*results, strict=True)
    ]
    del results
    clock = CudaClock()
    is_long = kernel in ("flce", "swiglu_linear", "geglu_linear")
    repetitions = Repetitions(least=9 if is_long else 30, most=1, seconds=0.0, settle_seconds=0.1 if is_long else 0.01)
    for direction in (Direction.FORWARD, Direction.BACKWARD):
        medians: dict[str, list[float]] = {OLD: [], NEW: []}
        for _ in range(series):
            timed = time_in_turns([call.candidate(direction) for call in calls], clock, repetitions)
            for package, quantiles in timed.items():
                medians[package].append(quantiles.median)
        yield {
            "kernel": kernel,
            "sizes": sizes,
            "budget": budget,
            "direction": direction.value,
            "largest_difference": max(differences),
            "old_seconds": medians[OLD],
            "new_seconds": medians[NEW],
        }


def measure(tree: Path, results: Path, *, series: int, only: str | None) -> None:
    import torch

    from ligerprof.runs.bench.session import CudaMachine

    import_renamed(tree)
    machine = CudaMachine()
    environment = machine.environment()
    for kernel, sizes, budget in cases():
        if only is not None and kernel not in only.split(","):
            continue
        started = time.monotonic()
        with results.open("a") as lines:
            for row in measure_case(kernel, sizes, budget, series):
                line = {"schema": 1, "kind": "kernel_turns", **environment, **row}
                lines.write(json.dumps(line) + "\n")
                print(next(table_rows([line])), flush=True)
        machine.release()
        torch.cuda.synchronize()
        print(f"{kernel} {sizes} {budget}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)


def spread(seconds: list[float]) -> float:
    """Largest deviation of a series' median from the median of all, as a share."""
    middle = statistics.median(seconds)
    return max(abs(value / middle - 1) for value in seconds)


def table_rows(lines: list[dict[str, Any]]) -> Iterator[str]:
    for row in lines:
        old, new = (statistics.median(row[f"{tree}_seconds"]) for tree in ("old", "new"))
        allowed = 1 + spread(row["old_seconds"]) + ALLOWED
        sizes = " x ".join(str(size) for size in row["sizes"].values())
        yield (
            f"| {row['kernel']} {row['budget']} | {sizes} | {row['direction']} | {1e6 * old:,.1f} | {1e6 * new:,.1f} |"
            f" {new / old:.3f} | {spread(row['old_seconds']):.3f} | {spread(row['new_seconds']):.3f} |"
            f" {row['largest_difference']:.1e} | {'' if new / old <= allowed else 'SLOWER'} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("tree", type=Path, help="folder that holds the other tree's ligerprof/")
    measuring.add_argument("results", type=Path)
    measuring.add_argument("--series", type=int, default=6)
    measuring.add_argument("--only", help="kernels, joined by commas")
    commands.add_parser("table").add_argument("results", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "measure":
        measure(arguments.tree, arguments.results, series=arguments.series, only=arguments.only)
        return
    print("| kernel | sizes | direction | old, us | new, us | new / old | spread of old | of new | difference | |")
    print("|---|---|---|---:|---:|---:|---:|---:|---:|---|")
    for line in table_rows([json.loads(text) for text in arguments.results.read_text().splitlines()]):
        print(line)


if __name__ == "__main__":
    main()
