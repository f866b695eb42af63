"""Build a recipe's model and run its warm-up and steady steps on fake tensors."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ligerprof.recipe.categories import Engine, Offload
from ligerprof.recipe.conflicts import require_packages, require_supported
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.recipe.usable_memory import find_limit, usable_memory
from ligerprof.roles import Backend, Phase
from ligerprof.runs.activation_offload import ActivationOffload
from ligerprof.runs.model_errors import model_failures_in_a_line
from ligerprof.runs.outcome import OutOfMemory, Progress, StepOutcome
from ligerprof.runs.recording.saved import SavedTensors
from ligerprof.runs.recording.stamping import Stamper
from ligerprof.runs.simulated.device import DeviceLimits, SimulatedDevice
from ligerprof.runs.simulated.engines import STAND_IN, built_trainer, joined_group, ranks_differ
from ligerprof.runs.simulated.experts import routed_experts
from ligerprof.runs.simulated.meter import PhaseMeter, StepFigures
from ligerprof.runs.simulated.notes import notes_on
from ligerprof.runs.simulated.patches import simulated_process
from ligerprof.runs.simulated.recorder import StorageRecorder
from ligerprof.runs.training import Trainer, Training, make_batch, train_step
from ligerprof.runs.versions import package_versions
from ligerprof.snapshots.collector import collector_paused
from ligerprof.snapshots.saved import with_saved_tensors
from ligerprof.torch_memory.allocator.caching import AllocatorFullError
from ligerprof.torch_memory.allocator.settings import parse_allocator_settings


def simulate_step(
    recipe: TrainingRecipe, *, record: bool = True, repeat: bool = True, progress: Progress | None = None
) -> StepOutcome:
    """Run one profiled step of a recipe without a GPU.

    Args:
        recipe: what to train, how, and on which GPU.
        record: whether to record events for the outcome's snapshot.
        repeat: whether to record also those micro-batches that repeat the events of earlier ones.
        progress: callback that receives a short status message.

    Raises:
        UnsupportedError: the simulator does not cover an option.
        KernelUnavailableError: kernels that cannot be simulated.
        ModelCodeError: the model's own code fails on the recipe.
        RecipeError: a memory limit above the GPU's memory, or allocator settings that torch would refuse.
    """
    require_supported(recipe, command="simulate", simulated=True)
    require_packages(recipe, command="simulate", simulated=True)
    first = _Simulation(recipe, 0, record=record, repeat=repeat, progress=progress or _silent)
    outcome = first.run()
    if recipe.engine is Engine.TORCH:
        return outcome
    if not first.is_uneven:
        note = f"Rank 0 of {recipe.gpus} was simulated; every rank holds as much."
        return replace(outcome, ranks={0: outcome}, notes=(*outcome.notes, note))
    # FSDP2 cuts shards from the first rank on, so that the last one has the smallest; the last part of ZeRO's flat
    # weights ends with the weights whose gradients arrive last
    last = recipe.gpus - 1
    other = _Simulation(recipe, last, record=record, repeat=repeat, progress=progress or _silent)
    outcomes = {0: outcome, last: other.run()}
    worst = max(outcomes, key=lambda rank: (outcomes[rank].oom is not None, outcomes[rank].peak_bytes, -rank))
    note = f"Ranks 0 and {last} of {recipe.gpus} were simulated, whose sizes differ; the figures are rank {worst}'s."
    return replace(outcomes[worst], ranks=outcomes, notes=(*outcomes[worst].notes, note))


class _Simulation:
    """One rank's run of simulate_step.

    Attributes:
        is_uneven: whether ranks hold different sizes.
    """

    def __init__(self, recipe: TrainingRecipe, rank: int, *, record: bool, repeat: bool, progress: Progress) -> None:
        self._recipe, self._rank, self._progress = recipe, rank, progress
        self.is_uneven = False
        settings = parse_allocator_settings(recipe.alloc_conf)
        self._device = SimulatedDevice(recipe.gpu_spec, _limits(recipe), settings, record=record)
        self._recorder = StorageRecorder(self._device)
        self._saved = SavedTensors(locate=self._recorder.locate, clock=self._device.now_us) if record else None
        self._stamper = Stamper(self._device.stamp, self._saved) if record else None
        self._meter = PhaseMeter(self._device, self._stamper)
        self._attention: set[str] = set()
        self._snapshot: dict[str, Any] = {}
        self._offload: ActivationOffload | None = None
        # other engines treat the last micro-batch differently; offloaded bytes are counted in each
        skips = not (record and repeat) and recipe.engine is Engine.TORCH and not recipe.activation_offload
        self._state = self._device.allocator.state if skips else None

    def run(self) -> StepOutcome:
        oom, recorder = None, self._recorder
        with (
            # storages are freed with their last reference, whenever the collector would run
            collector_paused(),
            joined_group(self._recipe, self._rank, self._device, recorder) as mesh,
            simulated_process(
                self._recipe.gpu_spec, recorder, self._attention, packed=self._recipe.holds_several_documents
            ),
            FakeTensorMode(),
            recorder,
            routed_experts(self._recipe, recorder),
            model_failures_in_a_line(self._recipe, AllocatorFullError),
        ):
            try:
                self._build_and_train(mesh)
            except AllocatorFullError as error:
                # the frames of the failed call still hold the live tensors
                self._take_snapshot()
                oom = self._out_of_memory(error)
        return self._outcome(oom)

    def _build_and_train(self, mesh: Any) -> None:
        self._progress(f"building {self._recipe.spec.name} on a simulated {self._recipe.gpu_spec.title}")
        with self._stamping() as see_model, built_trainer(self._recipe, mesh, self._recorder, see_model) as trainer:
            self.is_uneven = ranks_differ(self._recipe, trainer)
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
        batch = make_batch(recipe, STAND_IN)
        self._offload = trainer.offload if isinstance(trainer, Trainer) else None
        # the optimizer has no state in the first step, so the second is the earliest steady one
        last = max(recipe.warmup, 1) + 1
        for number in range(1, last + 1):
            self._progress(f"simulating step {number} of {last}")
            self._meter.next_step()
            train_step(trainer, batch, self._meter, self._state)
        if recipe.evaluation is not None:
            self._progress("simulating an evaluation")
            with self._meter.phase(Phase.EVALUATION):
                trainer.evaluate(make_batch(recipe.evaluation, STAND_IN))
        # model and optimizer are still alive, as they are when a GPU's history is dumped
        self._take_snapshot()

    def _take_snapshot(self) -> None:
        if self._saved is not None:
            self._snapshot = with_saved_tensors(self._device.snapshot(), self._saved.rows)

    def _out_of_memory(self, error: AllocatorFullError) -> OutOfMemory:
        return OutOfMemory(
            requested_bytes=error.requested_bytes,
            allocated_bytes=error.allocated_bytes,
            reserved_bytes=error.reserved_bytes,
            limit_bytes=error.limit_bytes,
            phase=self._meter.phase_now,
            step=self._meter.step,
        )

    def _host_bytes(self) -> int | None:
        """Main memory of what is offloaded, None if nothing is."""
        if self._offload is not None:
            return self._offload.host_bytes
        return None if self._recipe.offload is Offload.NONE else self._recorder.highest_host_bytes

    def _outcome(self, oom: OutOfMemory | None) -> StepOutcome:
        allocator = self._device.allocator
        steps = self._meter.steps or [StepFigures()]
        first, last = steps[0], steps[-1]
        second = steps[1] if self._recipe.engine is Engine.DDP and len(steps) > 1 else None
        return StepOutcome(
            backend=Backend.SIMULATED,
            gpu=self._recipe.gpu_spec.title,
            peak_bytes=allocator.highest_allocated_bytes if oom else last.peak_bytes,
            reserved_bytes=allocator.highest_reserved_bytes if oom else last.reserved_bytes,
            first_step_peak_bytes=first.peak_bytes,
            first_step_reserved_bytes=first.reserved_bytes,
            second_step_peak_bytes=None if second is None else second.peak_bytes,
            second_step_reserved_bytes=None if second is None else second.reserved_bytes,
            phases=last.phases,
            after_phase=last.after_phase,
            evaluation_reserved_bytes=last.evaluation_reserved_bytes,
            profiled_step=self._meter.step,
            snapshot=self._snapshot,
            oom=oom,
            versions=package_versions(),
            notes=tuple(notes_on(self._recipe, self._attention)),
            host_bytes=self._host_bytes(),
        )


def _limits(recipe: TrainingRecipe) -> DeviceLimits:
    # raises for a limit above the GPU's memory
    find_limit(recipe)
    return DeviceLimits(capacity_bytes=usable_memory(recipe).size_bytes, limit_bytes=recipe.memory_limit_bytes)


def _silent(_text: str) -> None:
    pass
