"""Check `fit --fastest`: measure its choice and 15 other recipes for the same training under the same limit.

    cd benchmarks/results
    python ../time_fastest.py draw time-fastest-drawn.jsonl
    python ../time_fastest.py measure time-fastest-drawn.jsonl time-fastest-h200.jsonl
    python ../time_fastest.py table time-fastest-h200.jsonl
    python ../time_fastest.py draw time-fastest-plans-drawn.jsonl --first 6

`draw` needs no GPU: it runs the search without simulation, and draws the others with a fixed seed from the recipes that
the search could have chosen, before anything is measured. `measure` requires a GPU; `table` does not.
"""

import argparse
import contextlib
import gc
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from time_steps import first_layers, timed  # type: ignore[import-not-found]

from ligerprof.analyzers.search.fastest import alternatives
from ligerprof.errors import DoesNotFitError
from ligerprof.library import fastest, plan
from ligerprof.models import load_model, spec_from_config
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.units import parse_bytes

SEED, OTHERS = 20261129, 15
# model, layers (None: all), micro-batch and accumulation as given, tokens, precision, limit
CASES: tuple[tuple[str, int | None, int, int, int, str, str], ...] = (
    ("llama3.2-1b", None, 8, 1, 1024, "bf16", "20GiB"),
    ("qwen2.5-0.5b", None, 8, 1, 1024, "amp", "16GiB"),
    ("llama3.1-8b", 4, 8, 1, 2048, "bf16", "30GiB"),
    ("mistral-7b-v0.3", 6, 4, 2, 1024, "bf16", "16GiB"),
    ("phi3-mini", 8, 8, 1, 2048, "bf16", "14GiB"),
    ("qwen3-1.7b", 14, 8, 1, 1024, "amp", "24GiB"),
    # limits under which plans of layers are the fastest
    ("llama3.1-8b", 4, 8, 1, 2048, "bf16", "18GiB"),
    ("phi3-mini", 8, 8, 1, 2048, "bf16", "12GiB"),
    ("qwen3-1.7b", 14, 8, 1, 1024, "amp", "20GiB"),
)
# of the others, plans for other micro-batches and kernels, where they fit
PLANS = 5


def recipes() -> Iterator[TrainingRecipe]:
    for model, layers, batch, accumulation, seq, precision, limit in CASES:
        spec = load_model(model)
        if layers is not None:
            spec = spec_from_config(first_layers(spec.config, layers), name=f"{model}, {layers} layers")
        options: dict[str, Any] = {"batch": batch, "grad_accum": accumulation, "seq": seq, "precision": precision}
        yield TrainingRecipe(model=spec, gpu="h200", memory_limit_bytes=parse_bytes(limit), **options)


def draw(target: Path, first: int) -> None:
    chosen = random.Random(SEED)
    with target.open("w") as lines:
        for case, recipe in list(enumerate(recipes()))[first:]:
            found = fastest(recipe, simulate=False)
            best = found.found[0].recipe
            others = [each for each in alternatives(recipe, {}) if each != best]
            planned = plans(chosen.sample([each for each in others if not each.checkpointing], PLANS)) if first else []
            drawn = [*planned, *chosen.sample([each for each in others if each not in planned], OTHERS)]
            rows = [(True, best), *((False, each) for each in drawn[:OTHERS])]
            for is_choice, each in rows:
                lines.write(json.dumps({"case": case, "choice": is_choice, "recipe": each.to_json()}) + "\n")
            print(case, recipe.summary, "->", best.summary, best.grad_accum, best.alloc_conf, flush=True)


def plans(given: list[TrainingRecipe]) -> list[TrainingRecipe]:
    """The plans of recipes that have one."""
    found = []
    for each in given:
        with contextlib.suppress(DoesNotFitError):
            found.append(plan(each, simulate=False).recipe)
    return found


def measure(drawn: Path, target: Path, budget: float) -> None:
    import torch

    began = time.perf_counter()
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    rows = [json.loads(line) for line in drawn.read_text().splitlines()]
    # the cases in turns, so that each has as many rows when time is up
    turns = sorted(range(len(rows)), key=lambda number: (number % (OTHERS + 1), number))
    with target.open("w") as lines:
        for row in (rows[number] for number in turns):
            if time.perf_counter() - began > budget:
                print("out of time")
                return
            recipe = TrainingRecipe.from_json({**row["recipe"], "device": "auto"})
            memory: Any = torch.cuda.memory
            memory._set_allocator_settings(recipe.alloc_conf or "expandable_segments:False")
            torch.cuda.set_per_process_memory_fraction((recipe.memory_limit_bytes or total_bytes) / total_bytes)
            try:
                found = timed(recipe, steps=3, profiled=False)
            except torch.OutOfMemoryError:
                found = {"error": "out of memory"}
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"[:300]}
            gc.collect()
            torch.cuda.empty_cache()
            lines.write(json.dumps({**row, **found, "gpu": torch.cuda.get_device_name()}) + "\n")
            lines.flush()
            print(row["case"], row["choice"], recipe.summary, found.get("error") or found["step_seconds"], flush=True)


def table(measured: Path) -> Iterator[str]:
    rows = [json.loads(line) for line in measured.read_text().splitlines()]
    yield "| training, limit | choice | ms per step | best of the others | ms per step | off the best | out of memory |"
    yield "|---|---|---:|---|---:|---:|---:|"
    for case, given in enumerate(recipes()):
        own = [row for row in rows if row["case"] == case]
        ran = [row for row in own if "error" not in row]
        choice = next((row for row in own if row["choice"]), None)
        others = sorted((row for row in ran if not row["choice"]), key=lambda row: row["step_seconds"])
        if choice is None or not others:
            continue
        failed = sum(row.get("error") == "out of memory" for row in own)
        best, name = others[0], f"{given.spec.name}, {given.batch * given.grad_accum} x {given.seq}, {CASES[case][-1]}"
        if "error" in choice:
            yield f"| {name} | {short(choice)} | {choice['error']} | {short(best)} | {_ms(best)} | | {failed} |"
            continue
        off = choice["step_seconds"] / min(choice["step_seconds"], best["step_seconds"]) - 1
        cells = (name, short(choice), _ms(choice), short(best), _ms(best), f"{100 * off:.1f} %", str(failed))
        yield f"| {' | '.join(cells)} |"


def _ms(row: dict[str, Any]) -> str:
    return f"{1000 * row['step_seconds']:.1f}"


def short(row: dict[str, Any]) -> str:
    recipe = TrainingRecipe.from_json({**row["recipe"], "device": "auto"})
    every = f", every {recipe.checkpoint_every}" if recipe.checkpoint_every > 1 else ""
    selective = f", {recipe.selective}" if recipe.selective else ""
    how = f"checkpointed{every}{selective}" if recipe.checkpointing else "not checkpointed"
    return f"{recipe.batch} x {recipe.grad_accum}, {how}, {recipe.liger}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("draw", "measure", "table"))
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--first", type=int, default=0, help="the first case to draw")
    given = parser.parse_args()
    if given.what == "draw":
        draw(given.files[0], given.first)
    elif given.what == "measure":
        measure(*given.files, given.seconds)
    else:
        print("\n".join(table(given.files[0])))


if __name__ == "__main__":
    main()
