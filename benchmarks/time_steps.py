"""Time whole training steps of drawn recipes on a GPU, to check predicted step times against.

    python benchmarks/time_steps.py measure benchmarks/results/time-steps-h200.jsonl [--seconds 180] [--set held-out]

`tuning` rows may be looked at while the time model is built, and have the GPU's kernels by operator from torch's
profiler; `held-out` rows may not. The recipes are drawn with a fixed seed from the lists below: five of each base, so
that recipes of one model can be ordered. All in one process: two steps to warm up, the median of five. One JSON line
per step.
"""

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ligerprof.errors import LigerprofError
from ligerprof.models import load_model, spec_from_config
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Phase

SEED = 20261128
PER_BASE = 5
# of a step that is timed twice only
LONG_SECONDS = 0.8
# model, layers (None: all), batches, sequence lengths
BASES: tuple[tuple[str, int | None, tuple[int, ...], tuple[int, ...]], ...] = (
    ("smollm2-135m", None, (2, 8, 16), (512, 1024)),
    ("qwen2.5-0.5b", None, (2, 4, 8), (512, 1024)),
    ("pythia-410m", None, (4, 8), (512, 1024)),
    ("gpt2-medium", None, (2, 8), (512, 1024)),
    ("llama3.2-1b", None, (2, 4, 8), (1024, 2048)),
    ("qwen3-1.7b", 14, (2, 4), (1024, 2048)),
    ("gemma2-2b", 8, (1, 2), (1024,)),
    ("phi3-mini", 8, (1, 2, 4), (1024, 2048)),
    ("qwen2.5-7b", 4, (2, 4), (1024, 2048)),
    ("llama3.1-8b", 4, (1, 2, 4), (1024, 4096)),
    ("mistral-7b-v0.3", 6, (2, 4), (512, 2048)),
)
PRECISIONS = ("bf16", "bf16", "amp", "bf16-amp", "fp32")
KERNELS = ("none", "none", "all", "no-flce", "flce", "all:liger")
CHECKPOINTING = ({"checkpointing": False}, {"checkpointing": True}, {"checkpointing": True, "checkpoint_every": 2})
ADAPTERS: tuple[dict[str, Any], ...] = ({}, {}, {}, {"lora": 16}, {"lora": 64, "lora_targets": "q_proj+v_proj"})
OPTIMIZERS = ("adamw-fused", "adamw-fused", "adamw-foreach", "sgd")
TUNING: tuple[tuple[str, int | None, dict[str, Any]], ...] = (
    ("llama3.2-1b", None, {"batch": 4, "seq": 1024, "precision": "bf16", "checkpointing": False}),
    ("llama3.2-1b", None, {"batch": 4, "seq": 1024, "precision": "amp", "checkpointing": True}),
    ("llama3.2-1b", None, {"batch": 4, "seq": 1024, "precision": "bf16", "checkpointing": True, "liger": "all"}),
    ("llama3.2-1b", 4, {"batch": 8, "seq": 1024, "precision": "bf16", "liger": "all", "provider": "liger"}),
    ("llama3.2-1b", 8, {"batch": 2, "seq": 1024, "precision": "fp32", "checkpointing": False}),
    ("llama3.1-8b", 3, {"batch": 4, "seq": 2048, "precision": "bf16", "checkpointing": False}),
    ("qwen2.5-0.5b", 12, {"batch": 1, "seq": 64, "precision": "bf16", "checkpointing": False}),
    ("qwen2.5-0.5b", 12, {"batch": 1, "seq": 64, "precision": "amp", "checkpointing": True}),
    ("qwen2.5-0.5b", 12, {"batch": 1, "seq": 64, "precision": "bf16", "liger": "all", "checkpointing": False}),
    ("qwen2.5-0.5b", 12, {"batch": 1, "seq": 64, "precision": "bf16", "lora": 16, "checkpointing": False}),
    ("qwen2.5-0.5b", 12, {"batch": 1, "seq": 64, "precision": "bf16", "optimizer": "adamw-foreach", "clip": 1.0}),
    ("qwen2.5-0.5b", 12, {"batch": 8, "seq": 1024, "precision": "bf16", "lora": 16, "checkpointing": True}),
    ("gemma2-2b", 4, {"batch": 2, "seq": 1024, "precision": "bf16", "attention": "eager", "checkpointing": False}),
    ("gpt2", None, {"batch": 8, "seq": 1024, "precision": "amp", "checkpointing": False, "clip": 1.0}),
    ("pythia-160m", None, {"batch": 8, "seq": 512, "precision": "bf16", "optimizer": "sgd", "checkpointing": False}),
)


def first_layers(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The config with fewer layers; lists with one entry per layer become shorter, too."""
    before = config["num_hidden_layers"]
    cut = {
        key: value[:layers] if isinstance(value, (list, tuple)) and len(value) == before else value
        for key, value in config.items()
    }
    return {**cut, "num_hidden_layers": layers}


def recipe_of(model: str, layers: int | None, options: Mapping[str, Any]) -> TrainingRecipe:
    spec = load_model(model)
    if layers is not None:
        spec = spec_from_config(first_layers(spec.config, layers), name=f"{model}, {layers} layers")
    return TrainingRecipe(model=spec, gpu="h200", **options)


def drawn() -> Iterator[tuple[str, TrainingRecipe]]:
    """The held-out recipes, each with the name of its base, in turns."""
    chosen = random.Random(SEED)
    found: dict[str, list[TrainingRecipe]] = {}
    for model, layers, batches, lengths in BASES:
        of_base = found.setdefault(model, [])
        while len(of_base) < PER_BASE:
            kernels, _, provider = chosen.choice(KERNELS).partition(":")
            options: dict[str, Any] = {
                "batch": chosen.choice(batches),
                "seq": chosen.choice(lengths),
                "liger": kernels,
                "provider": provider or "ligerprof",
                "precision": chosen.choice(PRECISIONS),
                "optimizer": chosen.choice(OPTIMIZERS),
                "clip": chosen.choice((None, 1.0)),
                **chosen.choice(CHECKPOINTING),
                **chosen.choice(ADAPTERS),
            }
            if model.startswith("gemma2"):
                options["attention"] = "eager"
            try:
                recipe = recipe_of(model, layers, options)
            except LigerprofError:
                # options that do not go together
                continue
            if recipe not in of_base:
                of_base.append(recipe)
    for turn in range(PER_BASE):
        for model, of_base in found.items():
            yield model, of_base[turn]


class Marks:
    """CUDA events at the ends of the phases."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        yield
        self.mark(phase.value)

    def loss_made(self, _loss: Any) -> None:
        pass

    def mark(self, name: str) -> None:
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.events.append((name, event))


def timed(recipe: TrainingRecipe, *, steps: int, profiled: bool) -> dict[str, Any]:
    import torch

    from ligerprof.runs.training import make_batch, torch_trainer, train_step

    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    with torch_trainer(recipe, device, lambda _model: None) as trainer:
        batch = make_batch(recipe, device)
        for _ in range(2):
            train_step(trainer, batch, Marks())
        seconds: list[float] = []
        host, phases = [], []
        while len(seconds) < (steps if not seconds or seconds[0] < LONG_SECONDS else 2):
            torch.cuda.synchronize()
            marks, started = Marks(), time.perf_counter()
            marks.mark("start")
            train_step(trainer, batch, marks)
            host.append(time.perf_counter() - started)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
            ends: dict[str, float] = {}
            for (_, before), (name, after) in zip(marks.events, marks.events[1:], strict=False):
                ends[name] = ends.get(name, 0.0) + before.elapsed_time(after) / 1000
            phases.append(ends)
        row: dict[str, Any] = {
            "step_seconds": statistics.median(seconds),
            "step_seconds_all": seconds,
            "host_seconds": statistics.median(host),
            "phase_seconds": {name: statistics.median(of[name] for of in phases) for name in phases[0]},
            "peak_bytes": torch.cuda.max_memory_allocated(),
        }
        if profiled:
            row["kernels"] = kernels_by_operator(lambda: train_step(trainer, batch, Marks()))
    return row


def kernels_by_operator(step: Any) -> list[list[Any]]:
    """Operator, calls and seconds of its kernels, and kernels with launches and seconds."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    rows = sorted(found.key_averages(), key=lambda row: -row.self_device_time_total)
    kept = [row for row in rows if row.self_device_time_total > 0][:90]
    return [[row.key[:160], row.count, row.self_device_time_total / 1e6, str(row.device_type)[-4:]] for row in kept]


def measure(results: Path, kinds: list[str], budget: float) -> None:
    import torch

    from ligerprof.runs.outcome import package_versions

    about = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {**package_versions(), "cuda": str(torch.version.cuda)},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    tuning = [("tuning", model, recipe_of(model, layers, options)) for model, layers, options in TUNING]
    rows = tuning if "tuning" in kinds else []
    if "held-out" in kinds:
        rows += [("held-out", model, recipe) for model, recipe in drawn()]
    began = time.perf_counter()
    with results.open("a") as lines:
        for kind, base, recipe in rows:
            if time.perf_counter() - began > budget:
                print("out of time", flush=True)
                return
            started = time.perf_counter()
            try:
                found = timed(recipe, steps=5, profiled=kind == "tuning")
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"[:500]}
            gc.collect()
            torch.cuda.empty_cache()
            row = {"set": kind, "base": base, "recipe": recipe.to_json(), **found, **about}
            lines.write(json.dumps(row) + "\n")
            lines.flush()
            took = time.perf_counter() - started
            said = found.get("error") or f"{1000 * found['step_seconds']:.1f} ms"
            print(f"{kind} {recipe.summary}: {said} ({took:.1f} s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "list"))
    parser.add_argument("results", type=Path)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--set", nargs="+", default=["tuning", "held-out"], choices=("tuning", "held-out"))
    given = parser.parse_args()
    if given.what == "list":
        for base, recipe in drawn():
            print(base, recipe.summary)
    else:
        measure(given.results, given.set, given.seconds)


if __name__ == "__main__":
    main()
