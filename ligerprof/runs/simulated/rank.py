"""Run a recipe's warm-up and steady steps on the simulated GPU of this process (`simulated_gpu`)."""

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed, nn
from torch.utils._python_dispatch import _disable_current_modes

from ligerprof.errors import LigerprofError, ModelCodeError
from ligerprof.kernels.device import simulated_device
from ligerprof.recipe.categories import Engine, Offload, Optimizer
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.recipe.usable_memory import find_limit, usable_memory
from ligerprof.roles import Backend, Phase
from ligerprof.runs.measured.ranks import engine_of
from ligerprof.runs.measured.step import Build, PhaseMeter, StepFigures
from ligerprof.runs.outcome import OutOfMemory, Progress, StepOutcome, figures_of, package_versions, silent
from ligerprof.runs.recording.patches import skip_when_compiling
from ligerprof.runs.recording.saved import SavedTensors, locate_on_cuda
from ligerprof.runs.recording.stamping import HOOKS, Stamper
from ligerprof.runs.simulated.server import apart
from ligerprof.runs.training import Trainer, Training, make_batch, torch_trainer, train_step
from ligerprof.serialization import select
from ligerprof.simulated_gpu.device import FULL_SIZES
from ligerprof.simulated_gpu.host_memory import HostMemory
from ligerprof.simulated_gpu.machine import Machine, install
from ligerprof.simulated_gpu.ranks.messages import Messages
from ligerprof.snapshots.collector import collector_paused
from ligerprof.snapshots.stamp import with_saved_tensors
from ligerprof.torch_memory.attention import AttentionKernel

_PACKAGE = f"{Path(__file__).parents[2]}/"
# files of frames between the failing call and the exception: those that run steps, the simulated GPU's, torch's, and
# generated code
_BETWEEN = (f"{_PACKAGE}runs/", f"{_PACKAGE}simulated_gpu/", "/torch/", "<")


@contextmanager
def model_failures_in_a_line(recipe: TrainingRecipe, *passing: type[Exception]) -> Iterator[None]:
    """Turn exceptions of the model's code, and of libraries that it calls, into one line; bugs of this package pass.

    Args:
        passing: exceptions that the caller handles, such as running out of memory.

    Raises:
        ModelCodeError: the model does not run with these options.
    """
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        # backward may have no frame of the calling code
        callers = [frame for frame in frames if not any(part in frame.filename for part in _BETWEEN)]
        ours = any(frame.filename.startswith(_PACKAGE) for frame in (frames[-1], *callers[-1:]))
        if ours or isinstance(error, (LigerprofError, *passing)):
            raise
        raise ModelCodeError(_describe(recipe, error, callers[-1] if callers else None)) from error


def _describe(recipe: TrainingRecipe, error: Exception, caller: traceback.FrameSummary | None) -> str:
    place = f"at {Path(caller.filename).name}:{caller.lineno}" if caller is not None else "in its backward pass"
    reason = " ".join(str(error).split())[:160].rstrip(".") or "no reason given"
    return (
        f"{recipe.spec.name}: the code of {recipe.spec.model_type} fails {place} with {type(error).__name__}: {reason}."
        " Check the config, or try --attention eager, --no-checkpointing or another --precision."
    )


def notes_on(recipe: TrainingRecipe, attention_used: set[str]) -> Iterator[str]:
    """Yield one sentence per note; `attention_used`: values of the AttentionKernels that ran."""
    gpu = recipe.gpu_spec
    yield (
        f"Simulated, not measured: transformers' code ran on a model of torch's CUDA allocator and operators, for one"
        f" {gpu.title}."
    )
    if not gpu.measured:
        yield (
            f"Assumed for {gpu.title}: its figures come from data sheets, and its attention kernel and workspaces from"
            " torch's source; only the H200 was measured."
        )
    if attention_used:
        kernels = " and ".join(sorted(AttentionKernel(name).label for name in attention_used))
        yield f"scaled_dot_product_attention uses {kernels} kernel there."
    if recipe.engine is Engine.DDP:
        yield "NCCL is taken to hold DDP's first bucket until the second step's first reduction."
    if recipe.packed_bits == 8:
        yield "8-bit weights: no input has outliers (LLM.int8)."
    if recipe.packed_bits is not None and find_spec("bitsandbytes") is None:
        kind = "LLM.int8" if recipe.packed_bits == 8 else "NF4, double quantization"
        yield (
            f"{recipe.packed_bits}-bit weights are stand-ins with the storages of bitsandbytes 0.50 ({kind}), which is"
            " not installed."
        )
    if (package := recipe.optimizer.row.package) is not None and find_spec(package) is None:
        version = {"bitsandbytes": "0.50", "galore_torch": "1.0"}[package]
        yield (
            f"The states of {recipe.optimizer} are stand-ins with the sizes of those of {package} {version}, which is"
            " not installed."
        )
    if recipe.optimizer is Optimizer.GALORE:
        yield (
            "cuSOLVER's workspace is not counted for matrices with fewer than 512 rows or columns, and for those that"
            " are nearly square."
        )
    if recipe.padding > 0:
        yield "Every batch is assumed to contain padding, and so to have a mask."
    if recipe.holds_several_documents:
        yield "Every packed row is assumed to hold several documents."


GPU = torch.device("cuda", 0)
_ENDLESS_BYTES = 2**62


@contextmanager
def _backward_outside_modes(then: Callable[[], None]) -> Iterator[None]:
    """Inside a dispatch mode, autograd takes each gradient for one of a subclass and adds none in place."""
    within = torch.autograd.backward

    def backward(*arguments: Any, **named: Any) -> None:
        with _disable_current_modes():
            within(*arguments, **named)
        then()

    with mock.patch.object(torch.autograd, "backward", backward):
        yield


def simulate_here(recipe: TrainingRecipe, progress: Progress, *, record: bool, repeat: bool) -> StepOutcome:
    """`simulate_step` in this process, which has not simulated before and ends afterwards."""
    last = recipe.gpus - 1
    run_last = None
    if last:
        run_last = apart(lambda: _Rank(recipe, last, record=record, repeat=repeat, progress=silent).run())
    first = _Rank(recipe, 0, record=record, repeat=repeat, progress=progress)
    outcome = first.run()
    if recipe.engine is Engine.TORCH:
        return outcome
    if not first.is_uneven or run_last is None:
        note = f"Rank 0 of {recipe.gpus} was simulated; every rank holds as much."
        return replace(outcome, ranks={0: outcome}, notes=(*outcome.notes, note))
    # FSDP2 cuts shards from the first rank on, so that the last one has the smallest; the last part of ZeRO's flat
    # weights ends with the weights whose gradients arrive last
    progress(f"simulating rank {last}")
    outcomes: dict[int, StepOutcome] = {0: outcome, last: run_last()}
    worst = max(outcomes, key=lambda rank: (outcomes[rank].oom is not None, outcomes[rank].peak_bytes, -rank))
    note = f"Ranks 0 and {last} of {recipe.gpus} were simulated, whose sizes differ; the figures are rank {worst}'s."
    # as the estimate says it, for the rank that holds the most of it
    host_bytes = max((each.host_bytes for each in outcomes.values() if each.host_bytes is not None), default=None)
    return replace(outcomes[worst], ranks=outcomes, host_bytes=host_bytes, notes=(*outcomes[worst].notes, note))


class _Rank:
    """One rank's run; `is_uneven`: whether ranks hold different sizes."""

    def __init__(self, recipe: TrainingRecipe, rank: int, *, record: bool, repeat: bool, progress: Progress) -> None:
        self._recipe, self._rank, self._progress = recipe, rank, progress
        self.is_uneven = False
        find_limit(recipe)
        self._machine = machine_for(recipe)
        self._device = self._machine.device
        self._saved = SavedTensors(locate=locate_on_cuda, clock=self._device.now_us) if record else None
        if record:
            self._device.start_history(most_entries=None, stacks=True, counts=True)
        if recipe.compile:
            skip_when_compiling(*HOOKS)
        self._stamper = Stamper(self._device.stamp, self._saved) if record else None
        self._meter = PhaseMeter(self._device, self._stamper, is_compiled=recipe.compile)
        self._snapshot: dict[str, Any] = {}
        self._offload: Any = None
        self._weights: list[nn.Parameter] = []
        self._host = None if recipe.offload is Offload.NONE else HostMemory()
        # other engines treat the last micro-batch differently; offloaded bytes are counted in each
        skips = not (record and repeat) and recipe.engine is Engine.TORCH and not recipe.activation_offload
        self._state = self._device.allocator.state if skips else None

    def run(self) -> StepOutcome:
        oom = None
        with (
            # storages are freed with their last reference, whenever the collector would run
            collector_paused(),
            simulated_device(sm_count=self._recipe.gpu_spec.sm_count),
            _as_rank(self._recipe, self._rank),
            self._host or nullcontext(),
            _backward_outside_modes(self._watch_gradients) if self._host and self._only_moves() else nullcontext(),
            model_failures_in_a_line(self._recipe, torch.OutOfMemoryError),
        ):
            try:
                self._build_and_train()
            except torch.OutOfMemoryError:
                # the frames of the failed call still hold the live tensors
                self._take_snapshot()
                oom = self._out_of_memory()
        return self._outcome(oom)

    def _only_moves(self) -> bool:
        """Whether backward computes nothing in main memory: ZeRO-3 has all its buffers before, FSDP2 adds nothing."""
        recipe = self._recipe
        return recipe.zero == 3 or (recipe.engine is Engine.FSDP2 and recipe.grad_accum == 1)

    def _watch_gradients(self) -> None:
        for weight in self._weights:
            gradient = getattr(weight.grad, "_local_tensor", weight.grad)
            if gradient is not None and not gradient.is_cuda:
                assert self._host is not None
                self._host.watch(gradient)

    def _build_and_train(self) -> None:
        recipe = self._recipe
        self._progress(f"building {recipe.spec.name} on a simulated {recipe.gpu_spec.title}")
        build: Build = torch_trainer if recipe.engine is Engine.TORCH else engine_of(recipe.engine)[0]
        with self._stamping() as see_model, build(recipe, GPU, see_model) as trainer:
            self.is_uneven = trainer.ranks_differ
            self._train(trainer)

    @contextmanager
    def _stamping(self) -> Iterator[Callable[[nn.Module], None]]:
        """Stamp the modules of the models that the yielded function receives, if events are recorded."""
        if self._stamper is None:
            yield lambda _model: None
            return
        with closing(self._stamper) as stamper:
            stamper.open()
            yield stamper.attach

    def _train(self, trainer: Training) -> None:
        recipe = self._recipe
        batch = make_batch(recipe, GPU)
        self._offload = trainer.offload if isinstance(trainer, Trainer) else None
        self._weights = list(trainer.model.parameters()) if isinstance(trainer, Trainer) else []
        # the optimizer has no state in the first step, so the second is the earliest steady one
        last = max(recipe.warmup, 1) + 1
        for number in range(1, last + 1):
            self._progress(f"simulating step {number} of {last}")
            self._meter.next_step()
            train_step(trainer, batch, self._meter, self._state)
        if recipe.evaluation is not None:
            self._progress("simulating an evaluation")
            with self._meter.phase(Phase.EVALUATION):
                trainer.evaluate(make_batch(recipe.evaluation, GPU))
        # model and optimizer are still alive, as they are when a GPU's history is dumped
        self._take_snapshot()

    def _take_snapshot(self) -> None:
        if self._saved is not None:
            self._snapshot = with_saved_tensors(self._device.snapshot(), self._saved.rows)

    def _out_of_memory(self) -> OutOfMemory:
        full = self._device.ran_out
        assert full is not None
        return OutOfMemory(**select(full, *FULL_SIZES), phase=self._meter.phase_now, step=self._meter.step)

    def _host_bytes(self) -> int | None:
        """Main memory of what is offloaded, None if nothing is."""
        if self._offload is not None:
            return int(self._offload.host_bytes)
        return None if self._host is None else self._host.highest_bytes

    def _outcome(self, oom: OutOfMemory | None) -> StepOutcome:
        allocator = self._device.allocator
        steps = self._meter.steps or [StepFigures()]
        last = steps[-1]
        return StepOutcome(
            **figures_of(steps, last, self._recipe.engine),
            backend=Backend.SIMULATED,
            gpu=self._recipe.gpu_spec.title,
            peak_bytes=allocator.highest_allocated_bytes if oom else last.peak_bytes,
            reserved_bytes=allocator.highest_reserved_bytes if oom else last.reserved_bytes,
            profiled_step=self._meter.step,
            snapshot=self._snapshot,
            oom=oom,
            versions=package_versions(),
            notes=tuple(notes_on(self._recipe, self._machine.operators.attention_used)),
            host_bytes=self._host_bytes(),
        )


def machine_for(recipe: TrainingRecipe, *, endless: bool = False) -> Machine:
    """The machine of this process, as the GPU of a recipe; `endless`: one whose memory does not run out."""
    machine = install(recipe.gpu_spec)
    machine.restart(
        recipe.gpu_spec,
        _ENDLESS_BYTES if endless else usable_memory(recipe).size_bytes,
        recipe.alloc_conf,
        limit_bytes=None if endless else recipe.memory_limit_bytes,
        routing=recipe.routing,
    )
    return machine


@contextmanager
def built_for_simulation(recipe: TrainingRecipe) -> Iterator[None]:
    """Within it, a model is built and runs on this process's simulated GPU; raises as `simulate_step` does."""
    with (
        collector_paused(),
        simulated_device(sm_count=recipe.gpu_spec.sm_count),
        model_failures_in_a_line(recipe, torch.OutOfMemoryError),
    ):
        yield


@contextmanager
def simulated_trainer(recipe: TrainingRecipe) -> Iterator[Trainer]:
    """A trainer in plain torch, built on this process's simulated GPU; raises as `simulate_step` does."""
    with built_for_simulation(recipe), torch_trainer(recipe, GPU, lambda _model: None) as trainer:
        yield trainer


@contextmanager
def _as_rank(recipe: TrainingRecipe, rank: int) -> Iterator[None]:
    if recipe.engine is Engine.TORCH:
        yield
        return
    Messages.is_alone = True
    place = {"RANK": str(rank), "WORLD_SIZE": str(recipe.gpus), "LOCAL_RANK": "0"}
    with mock.patch.dict(os.environ, place):
        distributed.init_process_group("nccl", world_size=recipe.gpus, rank=rank)
        try:
            yield
        finally:
            distributed.destroy_process_group()
