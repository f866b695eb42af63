"""Measure training steps on a CUDA device: recorded steps, a counted step, timed steps, and memory outside torch."""

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ligerprof.errors import LigerprofError, MissingDependencyError
from ligerprof.recipe.categories import Offload
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import STEP_PHASES, Backend, Phase
from ligerprof.runs.outcome import (
    OutOfMemory,
    OutsideMemory,
    OutsideMoment,
    Progress,
    StepOutcome,
    figures_of,
    package_versions,
)
from ligerprof.runs.recording.device import NvmlDevice
from ligerprof.runs.recording.patches import skip_when_compiling
from ligerprof.runs.recording.saved import SavedTensors, locate_on_cuda, unix_time_us
from ligerprof.runs.recording.stamping import HOOKS, Stamper
from ligerprof.runs.training import Training, make_batch, torch_trainer, train_step
from ligerprof.snapshots.stamp import with_saved_tensors


class OutsideLedger:
    """Reads counters of the driver next to those of torch's allocator; create it before the CUDA context."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # the properties need no context
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        self._nvml = None if uuid is None else NvmlDevice.find(f"GPU-{uuid}")
        before = None if self._nvml is None else self._nvml.memory()
        internals: Any = torch._C
        had_context = internals._cuda_hasPrimaryContext(device.index)
        self._others_bytes = None if before is None or had_context else before.used_bytes
        self._moments: list[OutsideMoment] = []

    def note(self, moment: str) -> None:
        """Read the counters; the first call creates the CUDA context."""
        torch.cuda.synchronize(self._device)
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        reserved_bytes = torch.cuda.memory_reserved(self._device)
        self._moments.append(
            OutsideMoment(
                moment=moment,
                outside_bytes=total_bytes - free_bytes - reserved_bytes,
                reserved_bytes=reserved_bytes,
                process_bytes=None if self._nvml is None else self._nvml.process_bytes().get(os.getpid()),
            )
        )

    def result(self) -> OutsideMemory:
        memory = None if self._nvml is None else self._nvml.memory()
        return OutsideMemory(
            moments=tuple(self._moments),
            other_processes_bytes=self._others_bytes,
            driver_bytes=None if memory is None else memory.reserved_bytes,
        )


# builds the training under the recipe's engine; calls back with the model before anything wraps it
Build = Callable[[TrainingRecipe, torch.device, Callable[[nn.Module], None]], AbstractContextManager[Training]]
# joins the other ranks, before the model is built
Join = Callable[[TrainingRecipe, torch.device], None]


def measure_step(
    recipe: TrainingRecipe,
    *,
    trace_directory: Path | None,
    progress: Progress,
    build: Build = torch_trainer,
    join: Join | None = None,
    index: int = 0,
) -> StepOutcome:
    """Train on a CUDA device: recorded steps, then a counted step, timed steps and a traced step.

    The figures are those of the counted step, which runs without recorder and stamps. With an evaluation they are those
    of the recorded step before it.

    Args:
        trace_directory: the folder for the profiler's trace; None: no trace.
        index: the device; it becomes the current one.

    Raises:
        MissingDependencyError: no CUDA device.
        LigerprofError: this process already holds memory of the device.
    """
    if not torch.cuda.is_available():
        raise MissingDependencyError("no CUDA device. Use --device simulated.")
    with ExitStack() as cleanup:
        session = _Session(recipe, progress, cleanup, index)
        try:
            session.join(join)
            with session.recorded():
                session.build(build)
                session.run_recorded()
            session.count()
            session.time()
            if trace_directory is not None:
                session.trace(trace_directory)
        except torch.OutOfMemoryError:
            return session.out_of_memory()
        return session.outcome()


@dataclass(slots=True)
class StepFigures:
    """Highest allocated and reserved bytes of one training step and of its phases.

    Attributes:
        evaluation_reserved_bytes: those of an evaluation after the step, which is one of `phases` and not of the step.
    """

    peak_bytes: int = 0
    reserved_bytes: int = 0
    evaluation_reserved_bytes: int | None = None
    phases: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(STEP_PHASES, 0))
    after_phase: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(STEP_PHASES, 0))


class PhaseMeter:
    """The observer of training steps: reads counters of memory per phase, and stamps events.

    Args:
        is_compiled: whether the loss is part of a compiled graph, which is one autograd node.
        ended: callback that receives the name of each phase of a step that ended.

    Attributes:
        step: number of the current step, 0 during the build.
        phase_now: the current phase, or the one in which memory ran out.
    """

    def __init__(
        self,
        device: Any,
        stamper: Stamper | None,
        *,
        is_compiled: bool = False,
        ended: Callable[[str], None] = lambda _phase: None,
    ) -> None:
        self._device, self._stamper, self._is_compiled, self._ended = device, stamper, is_compiled, ended
        self.step = 0
        self.phase_now = Phase.BUILD
        self.steps: list[StepFigures] = []

    def next_step(self) -> None:
        self.step += 1
        self.steps.append(StepFigures())

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Measure a phase of the step; `phase_now` stays if memory runs out in it."""
        self._enter(phase)
        try:
            yield
        except torch.OutOfMemoryError:
            self._read(phase)
            raise
        self._read(phase)
        if phase in STEP_PHASES:
            self._ended(phase.value)
        self._enter(Phase.OUTSIDE)

    def loss_made(self, loss: Tensor) -> None:
        """Label the autograd nodes of the loss."""
        if self._stamper is not None and self._is_compiled:
            self._stamper.label_outputs(loss)
        elif self._stamper is not None:
            self._stamper.label_loss(loss)

    def _enter(self, phase: Phase) -> None:
        self.phase_now = phase
        if self._stamper is not None:
            self._stamper.enter(step=self.step, phase=phase)
        self._device.allocator.reset_peaks()

    def _read(self, phase: Phase) -> None:
        allocator, figures = self._device.allocator, self.steps[-1]
        if phase is Phase.EVALUATION:
            figures.phases[phase] = allocator.peak_allocated_bytes
            figures.evaluation_reserved_bytes = allocator.peak_reserved_bytes
            return
        figures.peak_bytes = max(figures.peak_bytes, allocator.peak_allocated_bytes)
        figures.reserved_bytes = max(figures.reserved_bytes, allocator.peak_reserved_bytes)
        if phase in figures.phases:
            figures.phases[phase] = max(figures.phases[phase], allocator.peak_allocated_bytes)
            figures.after_phase[phase] = allocator.allocated_bytes


class _CudaCounters:
    """The counters of torch's own allocator, named as those of a simulated device's."""

    @property
    def allocator(self) -> "_CudaCounters":
        return self

    def reset_peaks(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    @property
    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated()

    @property
    def peak_allocated_bytes(self) -> int:
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    @property
    def peak_reserved_bytes(self) -> int:
        return torch.cuda.max_memory_reserved()


class _Unobserved:
    """Observes nothing."""

    def phase(self, _phase: Phase) -> AbstractContextManager[None]:
        return nullcontext()

    def loss_made(self, _loss: Tensor) -> None:
        pass


class _Session:
    """The state of one measurement."""

    def __init__(self, recipe: TrainingRecipe, progress: Progress, cleanup: ExitStack, index: int) -> None:
        self._recipe, self._progress, self._cleanup = recipe, progress, cleanup
        self._device = torch.device("cuda", index)
        self._outside = OutsideLedger(self._device)
        torch.cuda.set_device(self._device)
        self._outside.note("context")
        self._limit_bytes = _limit_memory(recipe, self._device)
        torch.cuda.empty_cache()
        if held_bytes := torch.cuda.memory_allocated():
            raise LigerprofError(f"this process already holds {held_bytes} bytes of the GPU. Start a fresh one.")
        self._stamper: Stamper | None = None
        self._snapshot: dict[str, Any] = {}
        self._recorded = PhaseMeter(_CudaCounters(), None)
        # of the step whose figures are reported
        self._counted: PhaseMeter | None = None
        self._seconds: list[float] = []
        self._uses_host = recipe.offload is not Offload.NONE or recipe.activation_offload
        self._host_base_bytes = _resident_bytes() if self._uses_host else 0
        self._host_bytes: int | None = None

    def join(self, join: Join | None) -> None:
        if join is not None:
            self._progress("joining the other ranks")
            join(self._recipe, self._device)
            self._outside.note("process_group")

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record allocator events with stamps; the snapshot is taken even if memory runs out."""
        memory: Any = torch.cuda.memory
        # context="all" would break non-reentrant checkpointing around Python autograd Functions
        memory._record_memory_history(max_entries=2_000_000, stacks="python", context="alloc")
        saved = SavedTensors(locate=locate_on_cuda, clock=unix_time_us)
        self._stamper = Stamper(memory._set_memory_metadata, saved)
        self._stamper.open()
        if self._recipe.compile:
            skip_when_compiling(*HOOKS)
        try:
            yield
        finally:
            self._stamper.close()
            self._stamper = None
            torch.cuda.synchronize()
            self._snapshot = with_saved_tensors(memory._snapshot(), saved.rows)
            memory._record_memory_history(enabled=None)
            memory._set_memory_metadata("")

    def build(self, build: Build) -> None:
        self._progress(f"building {self._recipe.spec.name}")
        torch.manual_seed(0)
        stamper = self._stamper
        seen = (lambda _: None) if stamper is None else stamper.attach
        self._trainer = self._cleanup.enter_context(build(self._recipe, self._device, seen))
        self._batch = make_batch(self._recipe, self._device)
        self._outside.note("model")

    def run_recorded(self) -> None:
        last = self._recipe.warmup + 1
        self._recorded = PhaseMeter(
            _CudaCounters(), self._stamper, is_compiled=self._recipe.compile, ended=self._note_first_step
        )
        for number in range(1, last + 1):
            self._progress(f"step {number} of {last}, recorded")
            if number == last:
                self._outside.note("warm_up")
            self._recorded.next_step()
            train_step(self._trainer, self._batch, self._recorded)
        if (evaluation := self._recipe.evaluation) is not None:
            self._progress("evaluating")
            with self._recorded.phase(Phase.EVALUATION):
                self._trainer.evaluate(make_batch(evaluation, self._device))

    def _note_first_step(self, phase: str) -> None:
        if self._recorded.step == 1:
            self._outside.note(phase)

    def count(self) -> None:
        """Run the step whose figures are reported, unless an evaluation has run since the recorded one."""
        if self._recipe.evaluation is None:
            self._progress("counting a step without the recorder")
            self._counted = PhaseMeter(_CudaCounters(), None)
            self._counted.next_step()
            train_step(self._trainer, self._batch, self._counted)
        else:
            # what an evaluation reserves stays reserved, and weights that it gathered may stay gathered
            self._counted = self._recorded
        self._outside.note("step")
        if self._uses_host:
            self._host_bytes = _resident_bytes() - self._host_base_bytes

    def time(self) -> None:
        for number in range(self._recipe.repeats):
            self._progress(f"timing step {number + 1} of {self._recipe.repeats}")
            torch.cuda.synchronize()
            started = time.perf_counter()
            train_step(self._trainer, self._batch, _Unobserved())
            torch.cuda.synchronize()
            self._seconds.append(time.perf_counter() - started)

    def trace(self, directory: Path) -> None:
        """Profile one step for TensorBoard's PyTorch plugin."""
        from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

        self._progress("tracing a step for TensorBoard")
        with profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
            schedule=schedule(wait=0, warmup=1, active=1),
            on_trace_ready=tensorboard_trace_handler(str(directory), use_gzip=True),
            record_shapes=True,
            profile_memory=True,
        ) as profiler:
            for _ in range(2):
                train_step(self._trainer, self._batch, _Unobserved())
                torch.cuda.synchronize()
                profiler.step()

    def outcome(self) -> StepOutcome:
        if self._counted is None:
            raise LigerprofError("the step ended before it was counted.")
        recorded, counted = self._recorded.steps[-1], self._counted.steps[-1]
        notes = list(self._trainer.notes())
        if self._recipe.compile:
            notes.append("the estimate is that of the step without torch.compile")
        if recorded.peak_bytes != counted.peak_bytes:
            difference_bytes = recorded.peak_bytes - counted.peak_bytes
            notes.append(f"the recorded step's peak is {difference_bytes:+d} bytes off the reported, unrecorded one")
        return dataclasses.replace(
            self._outcome(counted, peak_bytes=counted.peak_bytes, reserved_bytes=counted.reserved_bytes),
            step_seconds=tuple(self._seconds),
            notes=tuple(notes),
            host_bytes=self._host_bytes,
        )

    def out_of_memory(self) -> StepOutcome:
        """The result of a step that did not fit, with the counters after it; `run_step` prefers the snapshot."""
        oom = OutOfMemory(
            requested_bytes=None,
            allocated_bytes=torch.cuda.memory_allocated(),
            reserved_bytes=torch.cuda.memory_reserved(),
            limit_bytes=self._limit_bytes,
            phase=(self._counted or self._recorded).phase_now,
            step=self._recorded.step,
        )
        last = self._recorded.steps[-1] if self._recorded.steps else StepFigures()
        peak_bytes, reserved_bytes = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return dataclasses.replace(self._outcome(last, peak_bytes=peak_bytes, reserved_bytes=reserved_bytes), oom=oom)

    def _outcome(self, figures: StepFigures, *, peak_bytes: int, reserved_bytes: int) -> StepOutcome:
        return StepOutcome(
            **figures_of(self._recorded.steps, figures, self._recipe.engine),
            backend=Backend.MEASURED,
            gpu=torch.cuda.get_device_name(self._device),
            peak_bytes=peak_bytes,
            reserved_bytes=reserved_bytes,
            profiled_step=self._recorded.step,
            snapshot=self._snapshot,
            outside=self._outside.result(),
            versions={**package_versions(), "cuda": str(torch.version.cuda)},
        )


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _limit_memory(recipe: TrainingRecipe, device: torch.device) -> int:
    memory: Any = torch.cuda.memory
    if recipe.alloc_conf is not None:
        memory._set_allocator_settings(recipe.alloc_conf)
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    if recipe.memory_limit_bytes is None:
        return int(total_bytes)
    if recipe.memory_limit_bytes > total_bytes:
        raise LigerprofError(
            f"--memory-limit {recipe.memory_limit_bytes} bytes is more than the GPU's {total_bytes}. Lower it."
        )
    torch.cuda.set_per_process_memory_fraction(recipe.memory_limit_bytes / total_bytes, device)
    return recipe.memory_limit_bytes
