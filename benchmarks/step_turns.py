"""Time training steps of models without kernels, with liger-kernel's and with ligerprof's in turns; record peaks.

    python benchmarks/step_turns.py measure benchmarks/results/step-turns-h200.jsonl
    python benchmarks/step_turns.py table benchmarks/results/step-turns-h200.jsonl

One process, one model, one optimizer. Each round patches the kernels in and out: every candidate's steps run between
steps with liger-kernel's kernels, and are compared with the mean of those right before and after, so that a drifting
clock or a busy host affects both. Besides the clock's time, the host's own time per step (until it has launched all)
and the sum of the GPU's kernels (from torch's profiler) are recorded: a step whose kernels take much less than the
clock's time waits for the host. `measure` requires a GPU and appends one JSON line per cell.
"""

import argparse
import dataclasses
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from turns import median_interval

from ligerprof.analyzers.estimate import settle_flce_budget
from ligerprof.models import load_model, spec_from_config
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.bench.accuracy import turn_order


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
NONE, LIGER = "none", "liger-kernel, all"
# rounds of the steps without kernels, which are compared with nothing
PLAIN_ROUNDS = 2
PROFILED_STEPS = 1
# a step whose kernels take less than this share of the clock's time waits for the host
BUSY_SHARE = 0.93
# options of each candidate in addition to the cell's
CANDIDATES: dict[str, dict[str, Any]] = {
    NONE: {"liger": "none"},
    LIGER: {"liger": "all", "provider": "liger"},
    "ligerprof, all": {"liger": "all"},
    "ligerprof, all, auto": {"liger": "all", "flce_budget": "auto"},
}
GOALS = {(setting.recipe().spec.name, setting.batch, setting.seq): setting.goal for setting in SETTINGS}


@dataclass(frozen=True)
class Block:
    """A few steps without a pause, per step.

    Attributes:
        seconds: on the clock, the wait for the GPU included.
        host_seconds: until the host had launched everything.
        cpu_seconds: of all threads of the process until then, without the time that other processes took.
    """

    seconds: float
    host_seconds: float
    cpu_seconds: float


@dataclass
class Measured:
    """One candidate's figures.

    Attributes:
        blocks: the timed steps.
        against_liger: for each round, the seconds of liger-kernel's steps before and after over this candidate's.
        gpu_seconds: the sum of the kernels of one step.
        launches: kernels of one step.
        peak_bytes: highest max_memory_allocated of a steady step, model and optimizer included.
        requested_peak_bytes: the peak of requested bytes. Unlike `peak_bytes` it does not depend on unsplit blocks,
            which vary by up to 1 MiB with the layout of earlier blocks.
        flce_budget: the resolved budget.
    """

    blocks: list[Block]
    against_liger: list[float]
    gpu_seconds: float
    launches: float
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

    def timed(self, steps: int) -> Block:
        import torch

        torch.cuda.synchronize()
        started, cpu_started = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.step()
        launched, cpu_launched = time.perf_counter(), time.process_time()
        torch.cuda.synchronize()
        total, host, cpu = time.perf_counter() - started, launched - started, cpu_launched - cpu_started
        return Block(total / steps, host / steps, cpu / steps)

    def look(self, recipe: TrainingRecipe) -> Measured:
        """Put the recipe's kernels in, count a step's memory, and profile others."""
        with kernels_in(self._model, recipe):
            self.step()
            peaks_bytes = self.peaks_bytes()
            kernels = device_timeline(self.step, PROFILED_STEPS).kernels
        gpu_seconds, launches = (sum(values) for values in zip(*kernels.values(), strict=True))
        return Measured([], [], gpu_seconds, launches, *peaks_bytes, recipe.flce_budget)

    def block(self, recipe: TrainingRecipe, steps: int) -> Block:
        """Put the recipe's kernels in, warm up, and time steps."""
        with kernels_in(self._model, recipe):
            self.step()
            return self.timed(steps)


@dataclass(frozen=True)
class Timeline:
    """What the GPU did in one run.

    Attributes:
        kernels: seconds and launches of each kernel.
        gaps: seconds without a kernel, by the kernels before and after.
        seconds: from the first kernel's start to the last one's end.
    """

    kernels: dict[str, tuple[float, float]]
    gaps: dict[tuple[str, str], float]
    seconds: float


def device_timeline(run: Callable[[], object], runs: int) -> Timeline:
    """Profile the GPU, per run. The profiler slows the host down, not the kernels."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(runs):
            run()
        torch.cuda.synchronize()
    events = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in found.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    kernels: dict[str, tuple[float, float]] = {}
    gaps: dict[tuple[str, str], float] = {}
    (begun, ended, before), *_ = events
    for start, end, name in events:
        seconds, launches = kernels.get(name, (0.0, 0.0))
        kernels[name] = seconds + (end - start) / 1e6 / runs, launches + 1 / runs
        if start > ended:
            gaps[before, name] = gaps.get((before, name), 0.0) + (start - ended) / 1e6 / runs
        if end >= ended:
            ended, before = end, name
    return Timeline(kernels, gaps, (ended - begun) / 1e6 / runs)


def measure_cell(base: TrainingRecipe, *, rounds: int, steps: int) -> dict[str, Any]:
    import torch

    from ligerprof.runs.outcome import package_versions
    from ligerprof.runs.training import built_model

    found: dict[str, Measured] = {}
    missing: dict[str, str] = {}
    torch.manual_seed(0)
    with built_model(base, torch.device("cuda", torch.cuda.current_device())) as model:
        cell = Cell(base, model)
        recipes = {name: candidate_recipe(base, name) for name in CANDIDATES}
        for name, recipe in recipes.items():
            try:
                found[name] = cell.look(recipe)
            except Exception as error:  # other providers' kernels may raise anything; the rest still count
                missing[name] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        for number in range(rounds):
            names = [name for name in found if name != LIGER and (name != NONE or number < PLAIN_ROUNDS)]
            before = cell.block(recipes[LIGER], steps) if LIGER in found else None
            for index in turn_order(len(names), number):
                own = found[names[index]]
                own.blocks.append(cell.block(recipes[names[index]], steps))
                if before is None:
                    continue
                after = cell.block(recipes[LIGER], steps)
                own.against_liger.append((before.seconds + after.seconds) / 2 / own.blocks[-1].seconds)
                found[LIGER].blocks.append(after)
                before = after
    return {
        "schema": 2,
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
    models = [setting.model for setting in SETTINGS] if only is None else only.split(",")
    for setting in sorted(
        (one for one in SETTINGS if one.model in models), key=lambda one: (models.index(one.model), one.seq)
    ):
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
    yield (
        "| model | tokens | kernels | ms per step | host | host's processor | GPU's kernels | launches | tokens/s |"
        " times liger's | GPU's kernels | peak, MiB | requested |"
    )
    yield f"|---|---|---|{'---:|' * 10}"
    for line in results.read_text().splitlines():
        row = json.loads(line)
        recipe, candidates = row["recipe"], row["candidates"]
        where = f"{recipe['model']} | {recipe['batch']} x {recipe['seq']}"
        for name, one in candidates.items():
            ms, host_ms, cpu_ms = (
                1e3 * statistics.median(block[key] for block in one["blocks"])
                for key in ("seconds", "host_seconds", "cpu_seconds")
            )
            gpu_ms, tokens = 1e3 * one["gpu_seconds"], recipe["batch"] * recipe["seq"]
            kernels = candidates[LIGER]["gpu_seconds"] / one["gpu_seconds"] if LIGER in candidates else float("nan")
            yield (
                f"| {where} | {name} | {ms:.1f} | {host_ms:.1f} | {cpu_ms:.1f} | {gpu_ms:.1f} | {one['launches']:.0f} |"
                f" {1e3 * tokens / ms:,.0f} | {_interval(one['against_liger'])} | {kernels:.3f} |"
                f" {one['peak_bytes'] / 2**20:,.1f} | {one['requested_peak_bytes'] / 2**20:,.1f} |"
            )
        for name, reason in row["missing"].items():
            yield f"| {where} | {name} | {reason} |{' |' * 10}"
        goal = GOALS.get((recipe["model"], recipe["batch"], recipe["seq"]))
        if goal is not None and LIGER in candidates:
            yield from goal_lines(candidates, goal)


def _interval(shares: list[float]) -> str:
    if not shares:
        return "-"
    found = median_interval(shares)
    return f"{found.median:.3f} ({found.low:.3f} to {found.high:.3f})"


def goal_lines(candidates: dict[str, dict[str, Any]], goal: float) -> Iterator[str]:
    """Whether ligerprof's kernels reach the goal's speedup over liger-kernel without using more memory."""
    liger = candidates[LIGER]
    for name, own in candidates.items():
        if not name.startswith("ligerprof"):
            continue
        faster = statistics.median(own["against_liger"])
        more_bytes = own["requested_peak_bytes"] - liger["requested_peak_bytes"]
        seconds = statistics.median(block["seconds"] for block in own["blocks"])
        waits = "waits for the host" if own["gpu_seconds"] < BUSY_SHARE * seconds else "keeps the GPU busy"
        verdict = "met" if faster >= goal and more_bytes <= 0 else "MISSED"
        yield f"goal {verdict}: {name}: {faster:.3f} >= {goal}, {more_bytes:+,} bytes <= 0; {waits}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "table"))
    parser.add_argument("results", type=Path)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=3, help="timed steps per round and candidate, without a pause")
    parser.add_argument("--models", help="measure only these models, joined by commas")
    parser.add_argument("--minutes", type=float, default=9.0, help="start no model after this time")
    arguments = parser.parse_args()
    if arguments.what == "measure":
        options = {"rounds": arguments.rounds, "steps": arguments.steps, "minutes": arguments.minutes}
        measure(arguments.results, only=arguments.models, **options)
    for row in table_rows(arguments.results):
        print(row)


if __name__ == "__main__":
    main()
