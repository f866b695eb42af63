"""Measure FSDP2 and DDP on several GPUs rank by rank, and compare estimate and simulation with the rows.

    python benchmarks/ranks.py measure benchmarks/results/ranks-h200x2.jsonl
    python benchmarks/ranks.py measure /tmp/try.jsonl --first 3
    python benchmarks/ranks.py measure benchmarks/results/ddp-alone-h200x2.jsonl --engine ddp --apart 1
    python benchmarks/ranks.py measure benchmarks/results/ranks-recomputation-h200x2.jsonl --recomputed --parts rows
    python benchmarks/ranks.py compare benchmarks/results/ranks-h200x2.jsonl --simulate

`measure` requires two GPUs, or `--gpus N`. It starts one process per GPU. They join once, and then build and train each
model anew, so that a configuration takes seconds. With `--apart N` each configuration has processes of its own, N
configurations at a time: what one leaves behind, as DDP does, is then not in the reserved bytes of the next. Each row
has the recipe, and per rank the highest allocated and reserved bytes of the first three steps and the bytes outside
torch's allocator. Further rows follow: losses on all GPUs next to those on one, how often each group of weights is
gathered in a step, and the time of a step with the kernels of ligerprof and of liger-kernel in turns.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from ligerprof.recipe.training import TrainingRecipe

Options = dict[str, Any]
STEPS = 3
# cuBLAS's workspaces, which are cleared last
LEFT_BYTES = 2**27
LLAMA: Options = {"model": "llama3.2-1b", "batch": 2}
QWEN: Options = {"model": "qwen3-0.6b", "batch": 4}
GEMMA: Options = {"model": "gemma2-2b", "batch": 1, "attention": "eager"}
GPT2: Options = {"model": "gpt2-xl", "batch": 2}
PLAIN: Options = {"checkpointing": False}
ALL: Options = {"liger": "all"}
ACCELERATE: Options = {"wrap": "accelerate"}
# the first three are tried first
FSDP2: tuple[Options, ...] = (
    LLAMA,
    LLAMA | ACCELERATE | ALL | {"clip": 1.0},
    LLAMA | PLAIN,
    LLAMA | {"reduce_dtype": "bfloat16"},
    LLAMA | {"precision": "bf16"},
    LLAMA | {"precision": "amp"},
    LLAMA | {"precision": "fp32", "batch": 1},
    LLAMA | {"reshard": False},
    LLAMA | ACCELERATE,
    LLAMA | ACCELERATE | PLAIN | {"reshard": False},
    LLAMA | {"grad_accum": 2},
    LLAMA | {"grad_accum": 2, "grad_sync": "every"},
    LLAMA | {"clip": 1.0, "batch": 3, "seq": 777},
    LLAMA | ALL,
    LLAMA | ALL | PLAIN | {"grad_accum": 3, "reduce_dtype": "bfloat16"},
    LLAMA | ALL | {"provider": "liger"},
    LLAMA | {"offload": "all"},
    LLAMA | {"offload": "all", "clip": 1.0, "grad_accum": 2},
    LLAMA | {"replicate": 2},
    QWEN | PLAIN,
    QWEN | ALL,
    QWEN | ACCELERATE | {"grad_accum": 3},
    QWEN | PLAIN | {"reshard": False, "precision": "bf16"},
    QWEN | {"clip": 1.0, "reduce_dtype": "bfloat16", "batch": 1, "seq": 3000},
    GPT2,
    GPT2 | ACCELERATE | PLAIN | {"batch": 1},
    GPT2 | ALL | {"precision": "bf16"},
    GEMMA,
    GEMMA | ACCELERATE | ALL,
    {"model": "tinyllama-1.1b", "batch": 2, "wrap": "accelerate"},
    {"model": "llama3.1-8b", "batch": 1, "seq": 2048, "liger": "all"},
)
DDP: tuple[Options, ...] = (
    LLAMA,
    LLAMA | PLAIN | {"precision": "bf16"},
    LLAMA | {"grad_accum": 2},
    LLAMA | {"grad_accum": 2, "grad_sync": "every", "clip": 1.0},
    LLAMA | ALL | {"precision": "fp32"},
    QWEN | PLAIN,
    QWEN | ALL | {"clip": 1.0},
    {"model": "gpt2", "batch": 4},
    GPT2 | {"precision": "bf16"},
)
# with `--recomputed`
RECOMPUTED: tuple[Options, ...] = (
    LLAMA | ACCELERATE | {"engine": "fsdp2", "selective": "torchtitan"},
    LLAMA | {"engine": "fsdp2", "selective": "matmuls", "grad_accum": 2},
    LLAMA | ACCELERATE | {"engine": "fsdp2", "checkpoint_every": 2, "clip": 1.0},
    QWEN | {"engine": "fsdp2", "selective": "attention", "checkpoint_every": 3, "liger": "rms+swiglu+flce"},
    {"model": "tinyllama-1.1b", "batch": 2, "engine": "fsdp2", "selective": "torchtitan-2048x2048", "reshard": False},
    {"model": "llama3.1-8b", "batch": 1, "seq": 4096, "engine": "fsdp2", "selective": "torchtitan"} | ACCELERATE,
    LLAMA | {"engine": "ddp", "selective": "torchtitan", "precision": "amp"},
    QWEN | {"engine": "ddp", "checkpoint_every": 2, "precision": "bf16"},
)
# timed in turns: ligerprof's kernels and liger-kernel's
TURNS: tuple[Options, ...] = (
    {"model": "llama3.2-1b", "batch": 4, "liger": "all"},
    {"model": "tinyllama-1.1b", "batch": 4, "liger": "all", "wrap": "accelerate"},
)
PROVIDERS = ("ligerprof", "liger")
ROUNDS, STEPS_PER_ROUND = 8, 4
PROFILED = tuple(
    {"model": "tinyllama-1.1b", "liger": "all", "provider": provider, "wrap": wrap}
    for wrap in ("layers", "accelerate")
    for provider in PROVIDERS
)
LOSS_STEPS = 5
# gathered after two steps, as accelerate does to save the model
ZERO3: Options = {"engine": "deepspeed", "zero": 3}
SAVED: tuple[Options, ...] = (
    LLAMA | {"engine": "fsdp2"},
    {"model": "tinyllama-1.1b", "batch": 2, "engine": "fsdp2", "wrap": "accelerate", "liger": "all"},
    QWEN | {"engine": "fsdp2", "lora": 16, "batch": 1, "seq": 256},
    LLAMA | ZERO3,
    {"model": "tinyllama-1.1b", "batch": 2, "liger": "all"} | ZERO3,
    QWEN | ZERO3 | {"lora": 16, "batch": 1, "seq": 256},
)
PARTS = ["rows", "saving", "losses", "profiles", "times"]


def recipes(gpus: int) -> list[TrainingRecipe]:
    """The configurations, the first of each engine first."""
    sharded = [TrainingRecipe(**{"precision": "mixed"} | options, engine="fsdp2", gpus=gpus) for options in FSDP2]
    replicated = [TrainingRecipe(**{"precision": "amp"} | options, engine="ddp", gpus=gpus) for options in DDP]
    return [*sharded[:2], replicated[0], *sharded[2:], *replicated[1:]]


class Unwatched:
    """An observer that records nothing."""

    def phase(self, _phase: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def loss_made(self, _loss: Any) -> None:
        pass


class ProfiledPhases:
    """An observer that counts the ranges of FSDP2 in each phase of a step."""

    def __init__(self) -> None:
        self.ranges: dict[str, dict[str, int]] = {}

    @contextmanager
    def phase(self, phase: Any) -> Iterator[None]:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            yield
        names = Counter(event.name for event in profiler.events() if event.name.startswith("FSDP::"))
        self.ranges[phase.value] = dict(names)

    def loss_made(self, _loss: Any) -> None:
        pass


class Rank:
    """One process of the benchmark; rank 0 writes the rows."""

    def __init__(self, results: Path, seconds: float, pause: float) -> None:
        import torch
        from torch import distributed

        from ligerprof.runs.measured.ranks import rank_from_environment
        from ligerprof.runs.measured.step import OutsideLedger

        own = rank_from_environment()
        assert own is not None, "start it with `measure`"
        self.rank, self.gpus, self._results, self.pause = own.rank, own.world_size, results, pause
        self._deadline = time.monotonic() + seconds
        self.on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", own.local) if self.on_gpu else torch.device("cpu")
        limit = timedelta(seconds=90)
        if not self.on_gpu:
            distributed.init_process_group("gloo", timeout=limit)
            return
        ledger = OutsideLedger(self.device)
        torch.cuda.set_device(self.device)
        ledger.note("context")
        distributed.init_process_group("cpu:gloo,cuda:nccl", device_id=self.device, timeout=limit)
        ledger.note("process_group")
        self._probe(ledger.note)
        self.write({"kind": "probe", "ranks": self.gathered(ledger.result().to_json())})

    def _probe(self, note: Any) -> None:
        """Use one library after another, so that the ledger names what each takes."""
        import torch
        from torch import distributed, nn

        one = torch.ones(2**24, dtype=torch.bfloat16, device=self.device)
        note("tensor")
        both = torch.empty(self.gpus * one.numel(), dtype=one.dtype, device=self.device)
        distributed.all_gather_into_tensor(both, one)
        note("all_gather")
        distributed.reduce_scatter_tensor(one, both)
        note("reduce_scatter")
        distributed.all_reduce(one)
        note("all_reduce")
        square = torch.ones(512, 512, dtype=torch.bfloat16, device=self.device, requires_grad=True)
        (square @ square).sum().backward()
        note("product")
        heads = torch.ones(1, 4, 256, 64, dtype=torch.bfloat16, device=self.device, requires_grad=True)
        nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).sum().backward()
        note("attention")

    def gathered(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank."""
        from torch import distributed

        found: list[Any] = [None] * self.gpus
        distributed.all_gather_object(found, value)
        return found

    def write(self, row: dict[str, Any]) -> None:
        if self.rank == 0 and str(self._results) == "-":
            print(json.dumps(row), flush=True)
        elif self.rank == 0:
            with self._results.open("a") as lines:
                lines.write(json.dumps(row) + "\n")

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, file=sys.stderr, flush=True)

    def in_time(self) -> bool:
        """Whether there is time for more, in rank 0's opinion."""
        return bool(self.gathered(time.monotonic() < self._deadline)[0])

    def clean(self) -> None:
        """Give all memory back, cuBLAS's workspaces included."""
        import torch

        gc.collect()
        if self.on_gpu:
            torch.cuda.synchronize()
            # NCCL's watchdog lets go of the tensors of finished collectives, such as DDP's buckets, a moment later
            deadline = time.monotonic() + 3
            while torch.cuda.memory_allocated() > LEFT_BYTES and time.monotonic() < deadline:
                time.sleep(0.1)
                gc.collect()
            internals: Any = torch._C
            internals._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def attempt(self, name: str, work: Any) -> None:
        """Run a part on all ranks; an error ends this part only, as long as all ranks meet it."""
        if not self.in_time():
            self.say(f"LEFT OUT {name}: no time")
            return
        started, row, error = time.monotonic(), None, None
        self.clean()
        try:
            row = work()
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"[:500]
            if self.rank == 0:
                traceback.print_exc()
        errors = self.gathered(error)
        seconds = round(time.monotonic() - started, 1)
        if any(errors):
            self.write({"kind": "error", "name": name, "errors": errors})
            self.say(f"FAILED {name}: {errors}")
        elif row is not None:
            self.write({**row, "seconds": seconds, "finished": datetime.now(timezone.utc).isoformat()})
            self.say(f"{name}: {seconds} s")

    def trainer(self, recipe: TrainingRecipe) -> AbstractContextManager[Any]:
        from ligerprof.runs.measured.ranks import engine_of

        build, _ = engine_of(recipe.engine)
        return build(recipe, self.device, lambda _model: None)

    def row(self, recipe: TrainingRecipe) -> dict[str, Any]:
        """Peaks of the first steps of one configuration on all ranks."""
        import torch

        from ligerprof.runs.measured.step import OutsideLedger
        from ligerprof.runs.training import make_batch, train_step

        cuda = torch.cuda if self.on_gpu else None
        ledger = OutsideLedger(self.device) if cuda else None
        own: dict[str, Any] = {"rank": self.rank, "base_bytes": cuda.memory_allocated() if cuda else 0}
        own |= {"peaks": [], "reserved": [], "losses": []}
        with self.trainer(recipe) as trainer:
            batch = make_batch(recipe, self.device)
            own["built_bytes"] = cuda.memory_allocated() if cuda else 0
            for _ in range(STEPS):
                if cuda:
                    cuda.synchronize()
                    cuda.reset_peak_memory_stats()
                own["losses"].append(float(train_step(trainer, batch, Unwatched())))
                if cuda:
                    cuda.synchronize()
                    own["peaks"].append(cuda.max_memory_allocated())
                    own["reserved"].append(cuda.max_memory_reserved())
                time.sleep(self.pause)
            own["after_bytes"] = cuda.memory_allocated() if cuda else 0
            if ledger:
                ledger.note("step")
                own["outside"] = ledger.result().to_json()
        del trainer, batch
        return {"kind": "row", "recipe": recipe.to_json(), "ranks": self.gathered(own), **self.machine()}

    def machine(self) -> dict[str, Any]:
        """The GPU and the versions of a row."""
        import torch

        from ligerprof.runs.outcome import package_versions

        gpu = torch.cuda.get_device_name(self.device) if self.on_gpu else "none"
        return {"gpu": gpu, "versions": {**package_versions(), "cuda": torch.version.cuda}}

    def saving(self, recipe: TrainingRecipe) -> dict[str, Any]:
        """Peaks of two steps, and what gathering the whole model adds to what is there between steps."""
        import torch

        from ligerprof.runs.training import make_batch, train_step

        cuda = torch.cuda if self.on_gpu else None
        own: dict[str, Any] = {"rank": self.rank, "base_bytes": cuda.memory_allocated() if cuda else 0, "peaks": []}
        with self.trainer(recipe) as trainer:
            batch = make_batch(recipe, self.device)
            for work in (partial(train_step, trainer, batch, Unwatched()),) * 2 + (partial(gather, trainer),):
                if cuda:
                    cuda.synchronize()
                    cuda.reset_peak_memory_stats()
                own["before_bytes"] = cuda.memory_allocated() if cuda else 0
                work()
                if cuda:
                    cuda.synchronize()
                    own["peaks"].append(cuda.max_memory_allocated())
        del trainer, batch, work
        return {"kind": "saving", "recipe": recipe.to_json(), "ranks": self.gathered(own), **self.machine()}

    def profile(self, recipe: TrainingRecipe) -> dict[str, Any]:
        """How often each group is gathered and reduced in the phases of a steady step."""
        from ligerprof.runs.training import make_batch, train_step

        ranges = ProfiledPhases()
        with self.trainer(recipe) as trainer:
            batch = make_batch(recipe, self.device)
            train_step(trainer, batch, Unwatched())
            train_step(trainer, batch, ranges)
        del trainer
        return {"kind": "profile", "recipe": recipe.to_json(), "ranges": ranges.ranges}

    def turns(self, options: Options) -> dict[str, Any]:
        """Seconds per step of two sharded models, each with one provider's kernels, in turns."""
        import torch
        from torch import distributed

        from ligerprof.runs.training import make_batch, train_step

        seconds: dict[str, list[float]] = {name: [] for name in PROVIDERS}
        named = {
            name: TrainingRecipe(**options, provider=name, engine="fsdp2", gpus=self.gpus, precision="mixed")
            for name in PROVIDERS
        }
        batch = make_batch(named[PROVIDERS[0]], self.device)
        with self.trainer(named[PROVIDERS[0]]) as first, self.trainer(named[PROVIDERS[1]]) as second:
            trainers = dict(zip(PROVIDERS, (first, second), strict=True))
            for turn in range(ROUNDS + 1):
                for name in PROVIDERS if turn % 2 else reversed(PROVIDERS):
                    distributed.barrier()
                    torch.cuda.synchronize()
                    started = time.perf_counter()
                    for _ in range(STEPS_PER_ROUND):
                        train_step(trainers[name], batch, Unwatched())
                    torch.cuda.synchronize()
                    # the first turn compiles and warms up
                    if turn:
                        seconds[name].append((time.perf_counter() - started) / STEPS_PER_ROUND)
        del trainers, first, second
        both = self.gathered(seconds)
        slowest = {name: [max(pair) for pair in zip(*(each[name] for each in both), strict=True)] for name in PROVIDERS}
        return {
            "kind": "turns",
            "recipe": named[PROVIDERS[0]].to_json(),
            "step_seconds": slowest,
            "medians": {name: statistics.median(values) for name, values in slowest.items()},
        }

    def losses(self, folder: str) -> dict[str, Any]:
        """Losses of the tiny model on all ranks together, and of the whole batch on one; the same weights."""
        from torch import distributed

        found: dict[str, dict[str, list[float]]] = {}
        names = [None]
        if self.rank == 0:
            names = [folder]
        distributed.broadcast_object_list(names)
        shared: Options = {"model": names[0], "batch": 2 * self.gpus, "seq": 64, "clip": 1.0}
        shared["optimizer"] = "adamw"
        for liger in ("none", "all") if self.on_gpu else ("none",):
            for precision in ("fp32", "mixed"):
                options = shared | {"liger": liger}
                found[f"{precision} {liger}"] = {
                    "two": self._losses(TrainingRecipe(**options, engine="fsdp2", gpus=self.gpus, precision=precision)),
                    "one": self._losses(TrainingRecipe(**options, precision="fp32" if precision == "fp32" else "amp")),
                }
                if precision == "fp32":
                    found[f"{precision} {liger}"]["ddp"] = self._losses(
                        TrainingRecipe(**options, engine="ddp", gpus=self.gpus, precision=precision)
                    )
        return {"kind": "losses", "losses": found}

    def _losses(self, recipe: TrainingRecipe) -> list[float]:
        import torch

        from ligerprof.runs.training import built_model, make_trainer, train_step

        ids = torch.randint(
            0, recipe.spec.vocab_size, (recipe.batch, recipe.seq), generator=torch.Generator().manual_seed(5)
        )
        if recipe.gpus > 1:
            ids = ids.chunk(self.gpus)[self.rank]
        batch = {"input_ids": ids.to(self.device), "labels": ids.to(self.device)}
        own = []
        if recipe.gpus > 1:
            with self.trainer(recipe) as trainer:
                own = [float(train_step(trainer, batch, Unwatched())) for _ in range(LOSS_STEPS)]
        else:
            with built_model(recipe, self.device) as model:
                trainer = make_trainer(recipe, model, self.device.type)
                own = [float(train_step(trainer, batch, Unwatched())) for _ in range(LOSS_STEPS)]
        # the mean over equal parts of the batch is the loss of the batch
        return [statistics.fmean(each) for each in zip(*self.gathered(own), strict=True)]


def gather(trainer: Any) -> None:
    """Gather the model in main memory of rank 0, as `Accelerator.get_state_dict` does to save it."""
    if trainer.recipe.engine == "deepspeed":
        trainer.engine._zero3_consolidated_16bit_state_dict()
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=True)
    get_model_state_dict(trainer.model, options=options)


@contextmanager
def static_graph() -> Iterator[None]:
    """DDP with `static_graph=True`, which is not an option of a recipe."""
    from torch import nn

    plain: Any = nn.parallel.DistributedDataParallel
    with mock.patch.object(nn.parallel, "DistributedDataParallel", partial(plain, static_graph=True)):
        yield


def run_rank(results: Path, arguments: argparse.Namespace) -> None:
    """Everything that one process does."""
    from torch import distributed

    rank, first = Rank(results, arguments.seconds, arguments.pause), arguments.first
    chosen = chosen_recipes(rank.gpus, arguments)
    with static_graph() if arguments.static_graph else nullcontext():
        for number, recipe in enumerate(chosen[:first] if "rows" in arguments.parts else ()):
            rank.attempt(f"{number} {recipe.summary}", lambda recipe=recipe: rank.row(recipe))
    run_further_parts(rank, arguments)
    distributed.barrier()
    distributed.destroy_process_group()


def chosen_recipes(gpus: int, arguments: argparse.Namespace) -> list[TrainingRecipe]:
    """The configurations that the options ask for."""
    if arguments.recipe is not None:
        return [TrainingRecipe.from_json(json.loads(arguments.recipe))]
    if arguments.recomputed:
        return [TrainingRecipe(**{"precision": "mixed"} | options, gpus=gpus) for options in RECOMPUTED]
    return [recipe for recipe in recipes(gpus) if arguments.engine in (None, recipe.engine)]


def run_further_parts(rank: Rank, arguments: argparse.Namespace) -> None:
    """Losses, profiles and times; of each profile and time only the first with `--first`."""
    from ligerprof.runs.training import load_model

    count = None if arguments.first is None else 1
    if "saving" in arguments.parts:
        for options in SAVED[: arguments.first]:
            recipe = TrainingRecipe(**{"precision": "mixed"} | options, gpus=rank.gpus)
            rank.attempt(f"saving {options}", lambda recipe=recipe: rank.saving(recipe))
    if "losses" in arguments.parts:
        with tempfile.TemporaryDirectory() as folder:
            if rank.rank == 0:
                import torch

                torch.manual_seed(0)
                recipe = TrainingRecipe(model="tiny", precision="fp32")
                load_model(recipe, torch.device("cpu")).save_pretrained(folder)
            rank.attempt("losses", lambda: rank.losses(folder))
    if rank.on_gpu and "profiles" in arguments.parts:
        for options in PROFILED[:count]:
            recipe = TrainingRecipe(**options, engine="fsdp2", gpus=rank.gpus, precision="mixed")
            rank.attempt(f"profile {options}", lambda recipe=recipe: rank.profile(recipe))
    if rank.on_gpu and "times" in arguments.parts:
        for options in TURNS[:count]:
            rank.attempt(f"turns {options}", lambda options=options: rank.turns(options))


def measure(results: Path, arguments: argparse.Namespace) -> int:
    """Start a process per GPU and wait for them."""
    results.parent.mkdir(parents=True, exist_ok=True)
    if not arguments.apart:
        return start(arguments.gpus, sys.argv[2:])
    chosen = chosen_recipes(arguments.gpus, arguments)[: arguments.first]
    options = [f"--gpus={arguments.gpus}", f"--seconds={arguments.seconds}", "--parts=rows"]
    options += ["--static-graph"] if arguments.static_graph else []

    def measure_one(number: int) -> int:
        own = results.with_suffix(f".{number}.jsonl")
        code = start(arguments.gpus, [str(own), *options, "--recipe", json.dumps(chosen[number].to_json())])
        if own.exists():
            rows = [line for line in own.read_text().splitlines(keepends=True) if json.loads(line)["kind"] != "probe"]
            # one write, since others append too
            with results.open("a") as lines:
                lines.write("".join(rows))
            own.unlink()
        return code

    with ThreadPoolExecutor(arguments.apart) as pool:
        return max(pool.map(measure_one, range(len(chosen))))


def start(gpus: int, options: list[str]) -> int:
    """Start a process per GPU with the options of this script, and wait for them."""
    own = [str(Path(__file__).resolve()), "rank", *options]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}", *own]
    return subprocess.run(command, check=False, env={"OMP_NUM_THREADS": "8", **os.environ}).returncode


def compared(row: dict[str, Any], simulate: bool) -> dict[str, Any]:
    """One row's peaks and their predictions; a prediction that this version cannot make is its error text."""
    from ligerprof.analyzers.estimate import estimate
    from ligerprof.errors import LigerprofError

    recipe = TrainingRecipe.from_json(row["recipe"])
    # predictions are of the step after the warm-up
    steady = recipe.warmup
    worst = max(row["ranks"], key=lambda each: each["peaks"][steady])
    figures: dict[str, Any] = {"first": worst["peaks"][0], "second": worst["peaks"][1]}
    figures["steady"] = worst["peaks"][steady]
    # segments of the row before count as reserved
    if not worst["base_bytes"]:
        figures["reserved"] = worst["reserved"][steady]
    found: dict[str, Any] = {"recipe": described(recipe), "measured": figures}
    try:
        estimated = estimate(recipe)
        found["estimated"] = {"first": estimated.first_step_peak_bytes, "steady": estimated.peak_bytes}
    except LigerprofError as error:
        found["estimated"] = str(error)
    if simulate:
        from ligerprof.runs.simulated import simulate_step

        try:
            outcome = simulate_step(recipe, record=False)
            found["simulated"] = {"first": outcome.first_step_peak_bytes, "steady": outcome.peak_bytes}
            found["simulated"]["reserved"] = outcome.reserved_bytes
            if outcome.second_step_peak_bytes is not None:
                found["simulated"]["second"] = outcome.second_step_peak_bytes
        except LigerprofError as error:
            found["simulated"] = str(error)
    return found


def compare(results: Path, simulate: bool) -> None:
    """Print a Markdown table of all rows with the errors of the predictions, then the median and the worst of each."""
    errors: dict[str, list[float]] = {}
    rows = [row for line in results.read_text().splitlines() if (row := json.loads(line))["kind"] == "row"]
    predictions = ("estimated", "simulated") if simulate else ("estimated",)
    print(f"| configuration | GPUs | steady peak, MiB | reserved | {' | '.join(predictions)} |")
    print(f"|---|---:|---:|---:|{'---|' * len(predictions)}")
    for row in rows:
        found = compared(row, simulate)
        measured = found["measured"]
        cells = [found["recipe"], str(row["recipe"]["gpus"])]
        cells += [f"{measured[key] / 2**20:,.1f}" if key in measured else "" for key in ("steady", "reserved")]
        for predicted in predictions:
            figures = found[predicted]
            if isinstance(figures, str):
                cells.append(figures)
                continue
            ratios = {key: value / measured[key] - 1 for key, value in figures.items() if key in measured}
            for key, ratio in ratios.items():
                errors.setdefault(f"{predicted} {key}", []).append(abs(ratio))
            cells.append(", ".join(f"{key} {100 * ratio:+.3f} %" for key, ratio in ratios.items()))
        print(f"| {' | '.join(cells)} |", flush=True)
    print()
    for name, values in errors.items():
        median, worst = 100 * statistics.median(values), 100 * max(values)
        print(f"- {name}: median {median:.3f} %, worst {worst:.3f} % of {len(values)}")


def described(recipe: TrainingRecipe) -> str:
    """The options in which a recipe differs from the others of its engine."""
    from ligerprof.recipe.training import RECIPE_OPTIONS

    shown = (
        "checkpointing",
        "checkpoint_every",
        "selective",
        "grad_accum",
        "grad_sync",
        "clip",
        "liger",
        "provider",
        "attention",
        "offload",
        "wrap",
    )
    shown += ("reshard", "reduce_dtype", "replicate", "zero", "lora")
    plain = TrainingRecipe(engine=recipe.engine, gpus=recipe.gpus, precision=recipe.precision)
    differing = [name for name in shown if getattr(recipe, name) != getattr(plain, name)]
    options = [" ".join(RECIPE_OPTIONS[name].typed(getattr(recipe, name))) for name in differing]
    size = f"{recipe.spec.name} {recipe.batch} x {recipe.seq}"
    return ", ".join((recipe.engine, size, recipe.precision, *(f"`{option}`" for option in options)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "rank", "compare"))
    parser.add_argument("results", type=Path)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--engine", choices=("ddp", "fsdp2"), help="measure only this engine's configurations")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=PARTS, help=",".join(PARTS))
    parser.add_argument("--first", type=int, help="configurations to measure; of profiles and times, one")
    parser.add_argument("--seconds", type=float, default=330, help="after this time nothing new is begun")
    parser.add_argument("--recomputed", action="store_true", help="measure selective and partial checkpointing")
    parser.add_argument("--recipe", help="a recipe's JSON to measure instead")
    parser.add_argument("--apart", type=int, help="configurations at a time, each in processes of its own")
    parser.add_argument("--pause", type=float, default=0, help="seconds after each step of a row, for NCCL's watchdog")
    parser.add_argument("--static-graph", action="store_true", help="DDP with static_graph=True")
    parser.add_argument("--simulate", action="store_true", help="compare with the simulation, too")
    arguments = parser.parse_args()
    if arguments.what == "compare":
        compare(arguments.results, arguments.simulate)
    elif arguments.what == "measure":
        sys.exit(measure(arguments.results, arguments))
    else:
        run_rank(arguments.results, arguments)


if __name__ == "__main__":
    main()
