"""Run a recipe's build, warm-up and steady step on fake tensors, and tell what a GPU would have held."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ligerprof.recipe import TrainingRecipe, require_built
from ligerprof.roles import Phase
from ligerprof.runs.outcome import OutOfMemory, StepOutcome
from ligerprof.runs.simulated.device import DeviceLimits, SimulatedDevice
from ligerprof.runs.simulated.patches import providers_take_cpu_for_cuda, simulated_process
from ligerprof.runs.simulated.recorder import StorageRecorder
from ligerprof.runs.stamping import Stamper
from ligerprof.runs.training import Trainer, built_model, make_batch, make_optimizer, train_step
from ligerprof.snapshots.allocator import AllocatorFullError
from ligerprof.snapshots.allocator_settings import parse_allocator_settings

Progress = Callable[[str], None]


@dataclass(slots=True)
class _StepFigures:
    """Allocated and reserved bytes of one training step.

    Attributes:
        peak_bytes: over the whole step, what runs between phases included.
    """

    peak_bytes: int = 0
    reserved_bytes: int = 0
    phases: dict[Phase, int] = field(default_factory=dict)
    after_phase: dict[Phase, int] = field(default_factory=dict)


class _PhaseMeter:
    """Reads the simulated allocator's counters phase by phase, and stamps what follows."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._step = 0
        self.stamper = Stamper(device.stamp)
        self.current = Phase.BUILD
        self.figures: list[_StepFigures] = []

    def next_step(self) -> None:
        self._step += 1
        self.figures.append(_StepFigures())

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        self._enter(phase)
        try:
            yield
        finally:
            self._read(phase)
            self._enter(Phase.OUTSIDE)

    def loss_made(self, loss: Tensor) -> None:
        self.stamper.label_rest(loss)

    def _enter(self, phase: Phase) -> None:
        self.current = phase
        self.stamper.enter(step=self._step, phase=phase)
        self._device.allocator.reset_peaks()

    def _read(self, phase: Phase) -> None:
        allocator, figures = self._device.allocator, self.figures[-1]
        figures.peak_bytes = max(figures.peak_bytes, allocator.peak_allocated_bytes)
        figures.reserved_bytes = max(figures.reserved_bytes, allocator.peak_reserved_bytes)
        if phase is not Phase.OUTSIDE:
            figures.phases[phase] = max(figures.phases.get(phase, 0), allocator.peak_allocated_bytes)
            figures.after_phase[phase] = allocator.allocated_bytes


def simulate_step(recipe: TrainingRecipe, *, record: bool = True, progress: Progress | None = None) -> StepOutcome:
    """Run one profiled step of a recipe without a GPU.

    Args:
        recipe: what to train and how, and which GPU to stand for.
        record: whether to keep the events that make up the outcome's snapshot.
        progress: told what happens, one line each.

    Raises:
        NotBuiltError: the recipe asks for what the simulator does not cover.
        KernelUnavailableError: kernels that cannot be simulated.
    """
    require_built(recipe, command="simulate")
    return _Simulation(recipe, record=record, progress=progress or _silent).run()


class _Simulation:
    """One run of simulate_step."""

    def __init__(self, recipe: TrainingRecipe, *, record: bool, progress: Progress) -> None:
        self._recipe = recipe
        self._record = record
        self._progress = progress
        gpu = recipe.gpu_spec
        limits = DeviceLimits(capacity_bytes=gpu.usable_bytes, limit_bytes=recipe.memory_limit_bytes)
        self._device = SimulatedDevice(gpu, limits, parse_allocator_settings(recipe.alloc_conf), record=record)
        self._meter = _PhaseMeter(self._device)
        self._step = 0
        self._snapshot: dict[str, Any] = {}
        self._attention: set[str] = set()

    def run(self) -> StepOutcome:
        recorder = StorageRecorder(self._device)
        oom = None
        # storages must die when their last reference does, not when a collection happens to run
        was_collecting = gc.isenabled()
        gc.collect()
        gc.disable()
        try:
            with simulated_process(self._recipe.gpu_spec, recorder, self._attention), FakeTensorMode(), recorder:
                try:
                    self._build_and_train()
                except AllocatorFullError as error:
                    # the failed call's frames still hold what was alive
                    self._take_snapshot()
                    oom = self._out_of_memory(error)
        finally:
            if was_collecting:
                gc.enable()
        return self._outcome(oom)

    def _build_and_train(self) -> None:
        self._progress(f"building {self._recipe.spec.name} on a simulated {self._recipe.gpu_spec.title}")
        with built_model(self._recipe, torch.device("cpu")) as model, providers_take_cpu_for_cuda():
            self._train(model)

    def _train(self, model: nn.Module) -> None:
        recipe = self._recipe
        self._meter.stamper.attach(model)
        trainer = Trainer(
            recipe=recipe,
            model=model,
            optimizer=make_optimizer(recipe, model),
            scaler=torch.amp.GradScaler("cpu") if recipe.precision.endswith("fp16") and recipe.autocast else None,
            device_type="cpu",
        )
        batch = make_batch(recipe, torch.device("cpu"))
        for step in range(1, self._steps + 1):
            self._progress(f"simulating step {step} of {self._steps}")
            self._step = step
            self._meter.next_step()
            train_step(trainer, batch, self._meter)
        # model and optimizer are still there, as they are when a GPU's history is read
        self._take_snapshot()

    def _take_snapshot(self) -> None:
        if self._record:
            self._snapshot = self._device.snapshot()

    @property
    def _steps(self) -> int:
        return max(self._recipe.warmup, 1) + 1

    def _out_of_memory(self, error: AllocatorFullError) -> OutOfMemory:
        return OutOfMemory(
            requested_bytes=error.requested_bytes,
            allocated_bytes=error.allocated_bytes,
            reserved_bytes=error.reserved_bytes,
            limit_bytes=error.limit_bytes,
            phase=self._meter.current,
            step=self._step,
        )

    def _outcome(self, oom: OutOfMemory | None) -> StepOutcome:
        figures = self._meter.figures or [_StepFigures()]
        first, steady = figures[0], figures[-1]
        return StepOutcome(
            backend="simulated",
            gpu=self._recipe.gpu_spec.title,
            peak_bytes=steady.peak_bytes,
            reserved_bytes=steady.reserved_bytes,
            first_step_peak_bytes=first.peak_bytes,
            first_step_reserved_bytes=first.reserved_bytes,
            phases=steady.phases,
            after_phase=steady.after_phase,
            profiled_step=self._step,
            snapshot=self._snapshot,
            oom=oom,
            versions={name: version(name) for name in ("torch", "transformers")},
            notes=(f"Simulated without a GPU: fake tensors and a model of {self._recipe.gpu_spec.title}.",),
        )


def _silent(_text: str) -> None:
    pass
