"""Time training steps of models without kernels, with liger-kernel's and with ligerprof's in turns; record peaks.

    python benchmarks/step_turns.py measure benchmarks/results/step-turns-h200.jsonl
    python benchmarks/step_turns.py table benchmarks/results/step-turns-h200.jsonl

One process, one model, one optimizer: each round patches the kernels in and out, every other round in reverse order, so
that a drifting clock affects all alike. `measure` requires a GPU and appends one JSON line per cell.
"""

import argparse
import dataclasses
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ligerprof.analyzers.estimate import settle_flce_budget
from ligerprof.models import load_model, spec_from_config
from ligerprof.recipe.training import TrainingRecipe


@dataclass(frozen=True)
class Setting:
    """A model and its tokens; checkpointed, all in bf16.

    Attributes:
        layers: keep only the first layers, so that the model is built and trained in seconds; None: all.
        attention: what transformers must use if it has no other attention for the model.
        goal: how many times liger-kernel's tokens per second are wanted.
    """

    model: str
    batch: int
    seq: int
    layers: int | None = None
    attention: str = "sdpa"
    goal: float = 1.08

    def recipe(self) -> TrainingRecipe:
        spec = load_model(self.model)
        if self.layers is not None:
            spec = spec_from_config(first_layers(spec.config, self.layers), name=f"{self.model}, {self.layers} layers")
        return TrainingRecipe(
            model=spec,
            batch=self.batch,
            seq=self.seq,
            precision="bf16",
            checkpointing=True,
            attention=self.attention,
        )


def first_layers(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The config with fewer layers; lists with one entry per layer become shorter, too."""
    before = config["num_hidden_layers"]
    cut = {
        key: value[:layers] if isinstance(value, (list, tuple)) and len(value) == before else value
        for key, value in config.items()
    }
    return {**cut, "num_hidden_layers": layers}


SETTINGS = (
    Setting("llama3.2-1b", 4, 1024, goal=1.23),
    Setting("llama3.1-8b", 4, 1024, layers=16),
    Setting("mistral-7b-v0.3", 4, 1024, layers=16),
    # scores with a cap
    Setting("gemma2-2b", 4, 1024, attention="eager"),
    Setting("qwen3-1.7b", 4, 1024),
    Setting("qwen2.5-1.5b", 4, 1024),
    Setting("llama3.2-1b", 2, 4096),
)
LIGER = "liger-kernel, all"
# options of each candidate in addition to the cell's
CANDIDATES: dict[str, dict[str, Any]] = {
    "none": {"liger": "none"},
    LIGER: {"liger": "all", "provider": "liger"},
    "ligerprof, all": {"liger": "all"},
    "ligerprof, all, auto": {"liger": "all", "flce_budget": "auto"},
}
GOALS = {(setting.recipe().spec.name, setting.batch, setting.seq): setting.goal for setting in SETTINGS}


@dataclass
class Measured:
    """One candidate's figures.

    Attributes:
        seconds: time of each timed step.
        peak_bytes: highest max_memory_allocated of a steady step, model and optimizer included.
        requested_peak_bytes: the peak of requested bytes. Unlike `peak_bytes` it does not depend on unsplit blocks,
            which vary by up to 1 MiB with the layout of earlier blocks.
        flce_budget: the resolved budget.
    """

    seconds: list[float]
    peak_bytes: int
    requested_peak_bytes: int
    flce_budget: str | int


def candidate_recipe(base: TrainingRecipe, name: str) -> TrainingRecipe:
    return settle_flce_budget(dataclasses.replace(base, **CANDIDATES[name]))


def kernels_in(model: Any, recipe: TrainingRecipe) -> AbstractContextManager[Any]:
    if not recipe.kernels:
        return nullcontext()
    from ligerprof.kernels import apply

    return apply(model, "+".join(recipe.kernels), provider=recipe.provider, flce_budget=recipe.flce_budget)


class Unobserved:
    """An observer that records nothing."""

    def phase(self, _phase: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def loss_made(self, _loss: Any) -> None:
        pass


class Cell:
    """One model on the GPU, and a step of it."""

    def __init__(self, recipe: TrainingRecipe, model: Any) -> None:
        import torch

        from ligerprof.runs.training import Trainer, make_batch, make_optimizer

        self._device = torch.device("cuda", torch.cuda.current_device())
        self._model = model
        optimizer = make_optimizer(recipe, model)
        self._trainer = Trainer(recipe=recipe, model=model, optimizer=optimizer, scaler=None, device_type="cuda")
        self._batch = make_batch(recipe, self._device)

    def step(self) -> None:
        from ligerprof.runs.training import train_step

        train_step(self._trainer, self._batch, Unobserved())

    def peaks_bytes(self) -> tuple[int, int]:
        """Allocated and requested."""
        import torch

        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.step()
        torch.cuda.synchronize()
        counted = torch.cuda.memory_stats()
        return counted["allocated_bytes.all.peak"], counted["requested_bytes.all.peak"]

    def timed(self, steps: int) -> list[float]:
        import torch

        seconds = []
        for _ in range(steps):
            torch.cuda.synchronize()
            started = time.perf_counter()
            self.step()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        return seconds

    def run(self, recipe: TrainingRecipe, steps: int) -> Measured:
        """Put the recipe's kernels in, warm up, count a step and time others."""
        with kernels_in(self._model, recipe):
            self.step()
            peaks_bytes = self.peaks_bytes()
            self.step()
            return Measured(self.timed(steps), *peaks_bytes, recipe.flce_budget)


def measure_cell(base: TrainingRecipe, *, rounds: int, steps: int) -> dict[str, Any]:
    import torch

    from ligerprof.runs.training import built_model
    from ligerprof.runs.versions import package_versions

    found: dict[str, Measured] = {}
    missing: dict[str, str] = {}
    torch.manual_seed(0)
    with built_model(base, torch.device("cuda", torch.cuda.current_device())) as model:
        cell = Cell(base, model)
        for number in range(rounds):
            names = [name for name in CANDIDATES if name not in missing]
            for name in names[::-1] if number % 2 else names:
                try:
                    once = cell.run(candidate_recipe(base, name), steps)
                except Exception as error:  # other providers' kernels may raise anything; the rest still count
                    missing[name] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                    continue
                before = found.get(name)
                found[name] = (
                    once if before is None else dataclasses.replace(once, seconds=before.seconds + once.seconds)
                )
    return {
        "schema": 1,
        "kind": "step_turns",
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": dict(package_versions()),
        "recipe": base.to_json(),
        "rounds": rounds,
        "steps": steps,
        "candidates": {name: dataclasses.asdict(one) for name, one in found.items()},
        "missing": missing,
    }


def measure(results: Path, *, rounds: int, steps: int, only: str | None, minutes: float) -> None:
    import torch

    results.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * minutes
    for setting in SETTINGS:
        if only not in (None, setting.model):
            continue
        base = setting.recipe()
        name = f"{base.spec.name} {setting.batch} x {setting.seq}"
        started = time.monotonic()
        if started > deadline:
            print(f"{name}: not started within {minutes:g} minutes", file=sys.stderr)
            continue
        try:
            row = measure_cell(base, rounds=rounds, steps=steps)
        except Exception as error:  # the other models still count
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        finally:
            gc.collect()
            torch.cuda.empty_cache()
        with results.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
        print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr)


def table_rows(results: Path) -> Iterator[str]:
    yield "| model | tokens | kernels | ms per step | 20 % to 80 % | tokens/s | times liger's | peak, MiB | requested |"
    yield "|---|---|---|---:|---:|---:|---:|---:|---:|"
    for line in results.read_text().splitlines():
        row = json.loads(line)
        recipe, candidates = row["recipe"], row["candidates"]
        medians = {name: statistics.median(one["seconds"]) for name, one in candidates.items()}
        liger = medians.get(LIGER)
        for name, one in candidates.items():
            low, *_, high = statistics.quantiles(one["seconds"], n=5)
            tokens = recipe["batch"] * recipe["seq"] / medians[name]
            against = f"{liger / medians[name]:.3f}" if liger else "-"
            yield (
                f"| {recipe['model']} | {recipe['batch']} x {recipe['seq']} | {name} | {1000 * medians[name]:.1f} |"
                f" {1000 * low:.1f} to {1000 * high:.1f} | {tokens:,.0f} | {against} |"
                f" {one['peak_bytes'] / 2**20:,.1f} | {_mib(one.get('requested_peak_bytes'))} |"
            )
        for name, reason in row["missing"].items():
            yield f"| {recipe['model']} | {recipe['batch']} x {recipe['seq']} | {name} | {reason} | | | | | |"
        goal = GOALS.get((recipe["model"], recipe["batch"], recipe["seq"]))
        if goal is not None and liger:
            yield from goal_lines(candidates, medians, goal)


def _mib(size_bytes: int | None) -> str:
    """Empty for files from before it was counted."""
    return "" if size_bytes is None else f"{size_bytes / 2**20:,.1f}"


def goal_lines(candidates: dict[str, dict[str, Any]], medians: dict[str, float], goal: float) -> Iterator[str]:
    """Whether ligerprof's kernels reach the goal's speedup over liger-kernel without using more memory."""
    liger = candidates[LIGER]
    for name, own in candidates.items():
        if not name.startswith("ligerprof"):
            continue
        faster = medians[LIGER] / medians[name]
        # of a file from before requested bytes were counted, the allocated ones
        counted = "requested_peak_bytes" if "requested_peak_bytes" in own else "peak_bytes"
        more_bytes = own[counted] - liger[counted]
        verdict = "met" if faster >= goal and more_bytes <= 0 else "MISSED"
        yield f"goal {verdict}: {name}: {faster:.3f} >= {goal}, {more_bytes:+,} bytes <= 0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "table"))
    parser.add_argument("results", type=Path)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6, help="timed steps a round and candidate")
    parser.add_argument("--model", help="measure this model alone")
    parser.add_argument("--minutes", type=float, default=9.0, help="start no model after this time")
    arguments = parser.parse_args()
    if arguments.what == "measure":
        options = {"rounds": arguments.rounds, "steps": arguments.steps, "minutes": arguments.minutes}
        measure(arguments.results, only=arguments.model, **options)
    for row in table_rows(arguments.results):
        print(row)


if __name__ == "__main__":
    main()
