"""Draw recipes near a limit, and compare the verdict of the estimate with that of a step simulated under the limit.

    python benchmarks/verdicts.py draw --seed 1 --count 60 verdicts.jsonl
    python benchmarks/verdicts.py again verdicts.jsonl
    python benchmarks/verdicts.py count verdicts.jsonl

None requires a GPU. `draw` appends a row for each recipe; the limit is within 4 % (`--near`) of what the step
allocates or reserves, both drawn. `again` repeats the estimates of a file, and prints them in its format.
"""

import argparse
import json
import lzma
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

from ligerprof.analyzers.estimate import estimate, judge
from ligerprof.errors import LigerprofError
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.units import GIB

LARGEST_BYTES = 130 * GIB
NEAR = 0.04
SHIFTS = (-0.02, -0.015, -0.01, -0.006, -0.003, -0.0015, 0.0, 0.0015, 0.003, 0.006, 0.01, 0.015, 0.02)
COMMON = (
    "llama3.2-1b",
    "llama3.2-3b",
    "llama3.1-8b",
    "mistral-7b-v0.3",
    "qwen2.5-0.5b",
    "qwen2.5-1.5b",
    "qwen2.5-7b",
    "qwen3-0.6b",
    "qwen3-1.7b",
    "qwen3-4b",
    "qwen3-8b",
    "gemma2-2b",
    "gemma3-1b",
    "phi3-mini",
    "phi4-mini",
    "olmo2-1b",
    "smollm2-360m",
    "smollm2-1.7b",
    "tinyllama-1.1b",
)
OTHERS = (
    "gpt2-large",
    "gpt2-xl",
    "phi-1.5",
    "phi-2",
    "stablelm2-1.6b",
    "starcoder2-3b",
    "pythia-1b",
    "pythia-2.8b",
    "smollm3-3b",
    "olmo-1b",
    "olmo3-7b",
    "gemma-2b",
    "gemma3-270m",
    "granite3.1-2b",
    "glm4-9b",
    "ernie4.5-0.3b",
    "granite3-1b-a400m",
    "olmoe-1b-7b",
    "lfm2-700m",
    "falcon3-1b",
    "deepseek-v2-lite",
    "qwen1.5-moe-a2.7b",
    "qwen1.5-1.8b",
    "command-r7b",
    "falcon-h1-tiny-90m",
    "qwen3.5-9b",
)


def draw(source: Random) -> dict[str, Any]:
    """One recipe's options; they may not go together."""
    model = source.choice(COMMON if source.random() < 0.7 else OTHERS)
    options: dict[str, Any] = {
        "model": model,
        "batch": source.choice((1, 2, 2, 4, 4, 8)),
        "seq": source.choice((512, 1024, 1024, 2048, 2048, 4096)),
        "precision": source.choice(("bf16", "bf16", "bf16-amp", "bf16-amp", "amp", "fp32", "amp-fp16")),
        "checkpointing": source.random() < 0.6,
        "optimizer": source.choice(
            ("adamw-fused",) * 2 + ("adamw-foreach", "adamw", "adamw-8bit", "paged-adamw-8bit", "sgd", "adafactor")
        ),
        "grad_accum": source.choice((1, 1, 1, 2, 4)),
        "liger": source.choice(("none", "none", "all", "no-flce")),
        "attention": source.choice(("sdpa", "sdpa", "sdpa", "eager")),
        "gpu": source.choice(("h200", "h200", "h100", "a100-80g", "rtx4090", "l40s")),
    }
    if options["checkpointing"] and source.random() < 0.15:
        options["reentrant"] = True
    adapter = source.random()
    if adapter < 0.35:
        options["lora"] = source.choice((8, 16, 64))
    elif adapter < 0.5:
        options["qlora"] = source.choice((16, 64))
    if "lora" in options or "qlora" in options:
        options["lora_dropout"] = source.choice((0.0, 0.05))
    if source.random() < 0.25:
        options["eval_batch"] = source.choice((1, 2, 8))
    if source.random() < 0.2:
        options["alloc_conf"] = "expandable_segments:True"
    engine = source.choice(("torch",) * 6 + ("ddp", "fsdp2", "deepspeed"))
    if engine != "torch":
        options |= {"engine": engine, "gpus": source.choice((2, 2, 4, 8))}
    if engine == "fsdp2":
        options["precision"] = source.choice(("mixed", "mixed", "bf16"))
        options["optimizer"] = source.choice(("adamw-fused", "adamw-foreach", "sgd"))
    if engine == "deepspeed":
        options |= {"zero": source.choice((1, 2, 2, 3)), "precision": "mixed"}
        options["optimizer"] = source.choice(("adamw-fused", "adamw", "sgd"))
    return options


def recipe_of(row: dict[str, Any]) -> TrainingRecipe:
    return TrainingRecipe(**row["options"], memory_limit_bytes=row.get("memory_limit_bytes"))


def estimated(row: dict[str, Any]) -> dict[str, Any]:
    """The estimate's side of a row: figures, verdict, and whether the run completes under limits nearby."""
    found = estimate(recipe_of(row))
    limit_bytes, run = row["memory_limit_bytes"], found.run
    return {
        "estimated": judge(limit_bytes, run.completes_under, uncertain_share=run.uncertain_share),
        "estimated_allocated_bytes": found.highest_peak_bytes,
        "estimated_reserved_bytes": found.reserved_bytes,
        "nearby": "".join("+" if run.completes_under(int(limit_bytes * (1 + shift))) else "-" for shift in SHIFTS),
    }


def events_of(snapshot: dict[str, Any]) -> list[list[int]]:
    """[size, stream] of each allocation; [the number of the allocation] of each free."""
    events: list[list[int]] = []
    made: dict[int, int] = {}
    for entry in snapshot["device_traces"][0]:
        if entry["action"] == "alloc":
            made[entry["addr"]] = len(events)
            events.append([entry["size"], entry["stream"]])
        elif entry["action"] == "free_requested" and entry["addr"] in made:
            events.append([made.pop(entry["addr"])])
    return events


def compared(seed: int, number: int, near: float, events: Path | None) -> dict[str, Any]:
    """A row: what the simulated step takes, a limit near that, and both verdicts."""
    warnings.simplefilter("ignore")
    from ligerprof.runs.simulated import simulate_step

    source, begin = Random(f"verdicts {seed} {number}"), time.monotonic()
    row: dict[str, Any] = {"seed": seed, "number": number, "options": draw(source)}
    try:
        recipe = recipe_of(row)
        if estimate(recipe).highest_peak_bytes > min(LARGEST_BYTES, 0.9 * recipe.gpu_spec.memory_bytes):
            return {**row, "refused": "too large"}
        free = simulate_step(recipe, record=False)
        if free.oom is not None:
            return {**row, "refused": "does not fit the GPU"}
        reserved_bytes = max(
            free.reserved_bytes,
            free.first_step_reserved_bytes,
            free.second_step_reserved_bytes or 0,
            free.evaluation_reserved_bytes or 0,
        )
        allocated_bytes = max(free.peak_bytes, free.first_step_peak_bytes, free.second_step_peak_bytes or 0)
        row |= {"simulated_allocated_bytes": allocated_bytes, "simulated_reserved_bytes": reserved_bytes}
        near_bytes = source.choice((allocated_bytes, reserved_bytes))
        row["memory_limit_bytes"] = int(near_bytes * source.uniform(1 - near, 1 + near))
        limited = simulate_step(recipe_of(row), record=False)
        row["simulated"] = "fits" if limited.oom is None else "does not fit"
        row |= estimated(row)
        if events is not None and row["estimated"] != row["simulated"]:
            snapshot = simulate_step(recipe, record=True).snapshot
            with lzma.open(events / f"{seed}-{number}.json.xz", "wt") as file:
                json.dump(events_of(snapshot), file, separators=(",", ":"))
    except LigerprofError as error:
        return {**row, "refused": str(error)}
    except Exception as error:
        return {**row, "failed": f"{type(error).__name__}: {error}"[:500]}
    return {**row, "seconds": round(time.monotonic() - begin, 1)}


def draw_rows(arguments: argparse.Namespace) -> None:
    """Draw until so many rows have both verdicts, or the seconds are over."""
    begin, done, number = time.monotonic(), 0, 0
    with (
        ProcessPoolExecutor(arguments.at_once, mp_context=get_context("spawn")) as pool,
        arguments.rows.open("a") as out,
    ):
        waiting = set()
        while done < arguments.count and time.monotonic() - begin < arguments.seconds:
            while len(waiting) < 2 * arguments.at_once:
                waiting.add(pool.submit(compared, arguments.seed, number, arguments.near, arguments.events))
                number += 1
            finished = next(as_completed(waiting))
            waiting.remove(finished)
            row = finished.result()
            done += "estimated" in row
            out.write(json.dumps(row) + "\n")
            out.flush()
        pool.shutdown(wait=False, cancel_futures=True)
        for process in (pool._processes or {}).values():
            process.terminate()


def read(path: Path) -> list[dict[str, Any]]:
    read_bytes = lzma.decompress if path.suffix == ".xz" else bytes
    return [json.loads(line) for line in read_bytes(path.read_bytes()).splitlines()]


def count(rows: list[dict[str, Any]]) -> None:
    compared_rows = [row for row in rows if "estimated" in row]
    wrong = [row for row in compared_rows if row["estimated"] not in ("may not fit", row["simulated"])]
    is_open = [row for row in compared_rows if row["estimated"] == "may not fit"]
    for row in compared_rows:
        allocated, reserved = row["simulated_allocated_bytes"], row["simulated_reserved_bytes"]
        kind = "WRONG" if row in wrong else "open" if row in is_open else ""
        print(
            f"{row['seed']}-{row['number']:<4} {kind:5} {row['simulated']:12} {row['nearby']}"
            f" allocated {100 * (row['estimated_allocated_bytes'] / allocated - 1):+.2f} %"
            f" reserved {100 * (row['estimated_reserved_bytes'] / reserved - 1):+.2f} %"
            f" limit/allocated {row['memory_limit_bytes'] / allocated:.3f} limit/reserved"
            f" {row['memory_limit_bytes'] / reserved:.3f}",
            *(f"{key}={value}" for key, value in row["options"].items()),
        )
    print(f"{len(compared_rows)} verdicts, {len(is_open)} open, {len(wrong)} wrong")
    print(Counter(str(row.get("failed", row.get("refused")))[:110] for row in rows if "estimated" not in row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("draw", "again", "count"))
    parser.add_argument("rows", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--near", type=float, default=NEAR, help="the most that a limit is off, as a share")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--events", type=Path, help="folder for the simulated events of rows that differ")
    arguments = parser.parse_args()
    if arguments.what == "draw":
        draw_rows(arguments)
        return
    rows = read(arguments.rows)
    if arguments.what == "again":
        rows = [row if "estimated" not in row else {**row, **estimated(row)} for row in rows]
        sys.stdout.writelines(json.dumps(row) + "\n" for row in rows)
        return
    count(rows)


if __name__ == "__main__":
    main()
