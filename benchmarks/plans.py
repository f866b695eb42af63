"""Check `fit --plan`: peaks of plans against their promise, and their times against other ways to checkpoint.

    cd benchmarks/results
    python ../plans.py draw plans-drawn.jsonl
    python ../plans.py measure plans-drawn.jsonl plans-h200.jsonl
    python ../plans.py table plans-h200.jsonl

`draw` needs no GPU: for each of four models it plans for three limits, a quarter, a half and three quarters of the way
from full checkpointing to none. `measure` requires a GPU. It builds each model once, and switches the plans, full
checkpointing, every n-th layer, selective checkpointing and none in turns in one process, with expandable segments:
after a step to warm up, two steps are timed, in two rounds. Plans run under their limit, the others without one;
those hold it that reserve no more. Where the estimate says that one of these may give cached memory back under a
limit, it also runs under that limit, and counts there with that time. torch's activation_memory_budget follows, with
the same kernels, launched one by one from a compiled graph (aot_eager_decomp_partition).
`--alone MODEL SHARE` measures one plan in a process of its own, whose model was never under another plan.

plans-segments-h200.jsonl has the same plans and others without expandable segments, under which limits of these plans
do not hold; plans-first-h200.jsonl has plans that the search made when it let the allocator give cached memory back in
each step; plans-second-h200.jsonl has plans that torch's own modes checkpointed, next to others without a limit.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from time_steps import Marks, recipe_of  # type: ignore[import-not-found]

from ligerprof.recipe.training import TrainingRecipe

CONF = "expandable_segments:True"
# model, layers (None: all), options
MODELS: tuple[tuple[str, int | None, dict[str, Any]], ...] = (
    ("llama3.2-1b", None, {"batch": 8, "seq": 2048, "precision": "bf16"}),
    ("llama3.1-8b", 8, {"batch": 4, "seq": 2048, "precision": "bf16"}),
    ("qwen3-1.7b", 14, {"batch": 8, "seq": 1024, "precision": "amp"}),
    ("phi3-mini", 10, {"batch": 8, "seq": 2048, "precision": "bf16", "liger": "flce"}),
)
SHARES = (0.25, 0.5, 0.75)
OTHERS: dict[str, dict[str, Any]] = {
    "full": {},
    "every 2": {"checkpoint_every": 2},
    "every 3": {"checkpoint_every": 3},
    "every 4": {"checkpoint_every": 4},
    "attention": {"selective": "attention"},
    "matmuls": {"selective": "matmuls"},
    "none": {"checkpointing": False},
    "offload": {"activation_offload": True},
}
# of the host alone: a step that waits for it, with and without selective checkpointing
TUNING = ("qwen2.5-0.5b", 12, {"batch": 1, "seq": 64, "precision": "bf16", "alloc_conf": CONF})
TIMED, ROUNDS = 2, 2
GIB = 2**30


def draw(target: Path) -> None:
    import ligerprof

    with target.open("w") as lines:
        for model, layers, options in MODELS:
            base = recipe_of(model, layers, {**options, "alloc_conf": CONF})
            ends = [ligerprof.estimate(replace(base, **OTHERS[name])).reserved_bytes for name in ("full", "none")]
            for share in SHARES:
                limit_bytes = round((ends[0] + share * (ends[1] - ends[0])) / (GIB // 4)) * (GIB // 4)
                started = time.perf_counter()
                found = ligerprof.plan(base, limit_bytes)
                took = time.perf_counter() - started
                step = ligerprof.simulate(found.recipe, record=False)
                row = {
                    "model": found.recipe.spec.name,
                    "share": share,
                    "limit_bytes": limit_bytes,
                    "recipe": found.recipe.to_json(),
                    "layers": found.selection,
                    "peak_bytes": step.peak_bytes,
                    "reserved_bytes": step.reserved_bytes,
                    "predicted_seconds": found.chosen.time.seconds,
                    "by_keys": None if found.by_keys is None else found.by_keys.recipe.summary,
                    "search_seconds": took,
                    # other ways that reserve no more, but give cached memory back under this limit
                    "under_limit": [
                        name
                        for name in OTHERS
                        if name != "offload" and _retries(replace(base, **OTHERS[name]), limit_bytes)
                    ],
                }
                lines.write(json.dumps(row) + "\n")
                lines.flush()
                print(f"{row['model']} {limit_bytes / GIB:.2f} GiB: {row['layers']} ({took:.1f} s)", flush=True)


def _retries(recipe: TrainingRecipe, limit_bytes: int) -> bool:
    import ligerprof

    estimated = ligerprof.estimate(recipe)
    reserved_bytes = estimated.reserved_bytes
    # plans leave 1.5 % free
    keeps = reserved_bytes < 0.97 * limit_bytes and estimated.run.keeps_cache_under(round(0.985 * limit_bytes))
    return reserved_bytes <= 1.01 * limit_bytes and not keeps


class Bench:
    """Writes a row per measured block."""

    def __init__(self, target: Path, budget: float) -> None:
        import torch

        from ligerprof.runs.outcome import package_versions

        self.lines, self.ends = target.open("a"), time.perf_counter() + budget
        self.total_bytes = torch.cuda.get_device_properties(0).total_memory
        self.about = {
            "gpu": torch.cuda.get_device_name(),
            "versions": {**package_versions(), "cuda": str(torch.version.cuda)},
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }

    @property
    def is_over(self) -> bool:
        return time.perf_counter() > self.ends

    def block(self, step: Callable[[], Any], limit: int | None, **row: Any) -> None:
        """A step to warm up and timed ones, from an empty cache."""
        import torch

        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_per_process_memory_fraction((limit or self.total_bytes) / self.total_bytes)
        before = torch.cuda.memory_stats()["num_alloc_retries"]
        try:
            step()
            torch.cuda.synchronize()
            warm = torch.cuda.memory_stats()["num_alloc_retries"]
            seconds = []
            for _ in range(TIMED):
                started = time.perf_counter()
                step()
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - started)
            row |= {
                "seconds": seconds,
                "measured_peak_bytes": torch.cuda.max_memory_allocated(),
                "measured_reserved_bytes": torch.cuda.max_memory_reserved(),
                "retries": [warm - before, torch.cuda.memory_stats()["num_alloc_retries"] - warm],
            }
        except torch.OutOfMemoryError:
            row["error"] = "out of memory"
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        torch.cuda.set_per_process_memory_fraction(1.0)
        self.lines.write(json.dumps({**row, **self.about}) + "\n")
        self.lines.flush()
        said = row.get("error") or (
            f"{1000 * min(row['seconds']):.1f} ms, {row['measured_peak_bytes'] / GIB:.2f} GiB,"
            f" {row['measured_reserved_bytes'] / GIB:.2f} reserved, retries {row['retries']}"
        )
        print(f"{row['model']} {row['name']}: {said}", flush=True)


def measure(drawn: Path, target: Path, budget: float, alone: list[str] | None) -> None:
    import torch

    memory: Any = torch.cuda.memory
    memory._set_allocator_settings(CONF)
    bench = Bench(target, budget)
    rows = [json.loads(line) for line in drawn.read_text().splitlines()]
    if alone is not None:
        (row,) = (row for row in rows if [row["model"], str(row["share"])] == alone)
        measure_model(bench, TrainingRecipe.from_json(row["recipe"]), [{**row, "under_limit": []}], only=(), alone=True)
        return
    measure_host(bench)
    for model, layers, options in MODELS:
        base = recipe_of(model, layers, {**options, "alloc_conf": CONF})
        own = [row for row in rows if row["model"] == base.spec.name]
        if not bench.is_over:
            measure_model(bench, base, own)
    for model, layers, options in reversed(MODELS):
        for budget_share in SHARES:
            if not bench.is_over:
                recipe = recipe_of(model, layers, {**options, "alloc_conf": CONF, "checkpointing": False})
                measure_budget(bench, recipe, "aot_eager_decomp_partition", budget_share)


def measure_host(bench: Bench) -> None:
    """What selective checkpointing costs the host per operator."""
    from ligerprof.analyzers.step_time.account import account
    from ligerprof.analyzers.step_time.rates import Host

    model, layers, options = TUNING
    base = recipe_of(model, layers, options)
    cases = {"full": base, "attention": replace(base, selective="attention")}
    ledger = account(cases["attention"])
    calls = sum(count for (_, host), count in ledger.calls.items() if host is Host.SELECTION)
    measure_model(bench, base, [], only=tuple(cases), calls=calls)


def measure_model(
    bench: Bench, base: TrainingRecipe, plans: list[dict[str, Any]], only: tuple[str, ...] = tuple(OTHERS), **more: Any
) -> None:
    """The plans and the other ways to checkpoint of one model, in turns."""
    import torch

    from ligerprof.library import checkpoint
    from ligerprof.runs.activation_offload import ActivationOffload, enable_checkpointing
    from ligerprof.runs.training import Trainer, make_batch, torch_trainer, train_step

    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    others = {name: replace(base, **OTHERS[name]) for name in only}
    with torch_trainer(replace(base, checkpointing=True), device, lambda _model: None) as trainer:
        batch = make_batch(base, device)
        if only:
            # states exist before the first block
            train_step(trainer, batch, Marks())

        def switch(recipe: TrainingRecipe) -> Trainer:
            if recipe.checkpointing:
                enable_checkpointing(trainer.model, recipe)
            else:
                checkpoint(trainer.model, f"{recipe.spec.layers}*everything")
            # its hooks of the output head stay, so that offload comes last
            return replace(trainer, offload=ActivationOffload(trainer.model) if recipe.activation_offload else None)

        turns: list[tuple[str, TrainingRecipe, dict[str, Any] | None]] = []
        for row in plans:
            turns.append((f"plan {row['share']}", TrainingRecipe.from_json(row["recipe"]), row))
            limit = {"limit_bytes": row["limit_bytes"]}
            turns += [(f"{name} under {row['share']}", others[name], limit) for name in row["under_limit"]]
        turns += [(name, recipe, None) for name, recipe in others.items() if name != "offload"]
        rounds = [turns if turn % 2 == 0 else turns[::-1] for turn in range(ROUNDS)]
        rounds += [[("offload", others["offload"], None)]] if "offload" in others else []
        for turn, blocks in enumerate(rounds):
            for name, recipe, row in blocks:
                if bench.is_over:
                    return
                switched = switch(recipe)
                promised = {} if row is None else {key: value for key, value in row.items() if key != "recipe"}
                limit_bytes = None if row is None else row["limit_bytes"]
                bench.block(
                    partial(train_step, switched, batch, Marks()),
                    limit_bytes,
                    **{**promised, "model": base.spec.name, "name": name, "turn": turn, **more},
                )


def measure_budget(bench: Bench, recipe: TrainingRecipe, backend: str, share: float) -> None:
    """What torch chooses to keep of the decoder's compiled graph, for a share of what it would keep."""
    import torch
    import torch._functorch.config as functorch

    from ligerprof.runs.training import make_batch, torch_trainer, train_step

    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    torch._dynamo.reset()
    with functorch.patch(activation_memory_budget=share), torch_trainer(recipe, device, lambda _model: None) as trainer:
        batch = make_batch(recipe, device)
        inner = trainer.model.model
        inner.forward = torch.compile(inner.forward, backend=backend)
        started = time.perf_counter()
        try:
            train_step(trainer, batch, Marks())
        except Exception as error:
            print(f"{recipe.spec.name} budget {share}: {type(error).__name__}: {error}"[:300], flush=True)
            return
        torch.cuda.synchronize()
        bench.block(
            lambda: train_step(trainer, batch, Marks()),
            None,
            model=recipe.spec.name,
            name=f"budget {share} {backend}",
            turn=0,
            compile_seconds=time.perf_counter() - started,
        )


def table(measured: Path) -> Iterator[str]:
    rows = [json.loads(line) for line in measured.read_text().splitlines()]
    ran = [row for row in rows if "error" not in row]

    def seconds(model: str, name: str) -> float:
        return statistics.median(
            value for row in ran if (row["model"], row["name"]) == (model, name) for value in row["seconds"]
        )

    yield "| model, limit | plan | peak off the promise | reserved | ms per step | best other | ms per step | time |"
    yield "|---|---|---:|---:|---:|---|---:|---:|"
    for case in rows:
        if not case["name"].startswith("plan") or case["turn"] != 0:
            continue
        model, limit_bytes = case["model"], case["limit_bytes"]
        where = f"{model}, {limit_bytes / GIB:.2f} GiB"
        if "error" in case:
            yield f"| {where} | {case['layers']} | {case['error']} | | | | | |"
            continue
        own = seconds(model, case["name"])
        under = f" under {case['share']}"
        others = {
            row["name"]: seconds(model, row["name"])
            for row in ran
            if row["model"] == model
            and not row["name"].startswith("plan")
            and row["measured_reserved_bytes"] <= limit_bytes
            and (row["name"].endswith(under) or " under " not in row["name"])
            and row["name"] not in case["under_limit"]
        }
        best = min(others, key=lambda name: others[name])
        off = case["measured_peak_bytes"] / case["peak_bytes"] - 1
        cells = (
            where,
            case["layers"],
            f"{100 * off:+.2f} %",
            f"{case['measured_reserved_bytes'] / GIB:.2f} GiB",
            f"{1000 * own:.1f}",
            best,
            f"{1000 * others[best]:.1f}",
            f"{100 * (own / others[best] - 1):+.1f} %",
        )
        yield f"| {' | '.join(cells)} |"
    for row in ran:
        if row.get("calls"):
            host = seconds(row["model"], "attention") - seconds(row["model"], "full")
            yield f"selective checkpointing costs the host {1e6 * host / row['calls']:.1f} us per operator"
            break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("draw", "measure", "table"))
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--seconds", type=float, default=330)
    parser.add_argument("--alone", nargs=2, metavar=("MODEL", "SHARE"), help="one plan, in a process of its own")
    given = parser.parse_args()
    if given.what == "draw":
        draw(given.files[0])
    elif given.what == "measure":
        measure(*given.files, given.seconds, given.alone)
    else:
        print("\n".join(table(given.files[0])))


if __name__ == "__main__":
    main()
