"""Trace what training steps allocate and free for batches of any shape, with one simulated model."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ligerprof.recipe.conflicts import require_packages, require_supported
from ligerprof.recipe.lengths import BatchShape, recipe_of
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.model_errors import model_failures_in_a_line
from ligerprof.runs.simulated.device import DeviceLimits, SimulatedDevice
from ligerprof.runs.simulated.patches import STAND_IN, providers_take_cpu_for_cuda, simulated_process
from ligerprof.runs.simulated.recorder import StorageRecorder
from ligerprof.runs.training import Trainer, built_model, make_batch, make_trainer
from ligerprof.snapshots.collector import collector_paused
from ligerprof.torch_memory.allocator.caching import AllocatorFullError
from ligerprof.torch_memory.allocator.settings import AllocatorSettings, parse_allocator_settings

# a trace counts bytes; whether they fit is the replay's question
_NO_LIMIT = DeviceLimits(capacity_bytes=2**62, limit_bytes=None)


class StepTracer:
    """Runs parts of training steps on fake tensors and returns what each allocated and freed.

    Attributes:
        events: (address, size) of an allocation, (address, 0) of a free, since the last `take`.
        device, allocator: the device that all parts ran on, without a limit, and its allocator.
    """

    def __init__(self, recipe: TrainingRecipe, settings: AllocatorSettings) -> None:
        self._recipe = recipe
        self.device = SimulatedDevice(recipe.gpu_spec, _NO_LIMIT, settings, record=False, observe=self.observe)
        self.allocator = self.device.allocator
        self.events: list[tuple[int, int]] = []
        self._trainer: Trainer | None = None
        self._loss: Tensor | None = None

    def observe(self, action: str, address: int, size_bytes: int, _context: object) -> None:
        """Note an event of the allocator."""
        if action == "alloc":
            self.events.append((address, size_bytes))
        elif action == "free_completed":
            self.events.append((address, 0))

    def take(self) -> list[tuple[int, int]]:
        """The events since the last call."""
        taken, self.events = self.events, []
        return taken

    def start(self, trainer: Trainer) -> None:
        """Train with this trainer from now on."""
        self._trainer = trainer

    def micro_batch(self, shape: BatchShape) -> None:
        """Run forward and backward on a batch of a shape, which is gone afterwards."""
        trainer = self._trainer
        assert trainer is not None
        batch = make_batch(recipe_of(self._recipe, shape), STAND_IN)
        self._loss = trainer.forward(batch)
        trainer.backward(self._loss)
        # as train_step does: what the graph holds ends with the backward pass
        self._loss = self._loss.detach()

    def update(self) -> None:
        """Step the optimizer and drop the gradients."""
        trainer = self._trainer
        assert trainer is not None
        trainer.update()
        trainer.drop_gradients()
        self._loss = None


@contextmanager
def step_tracer(recipe: TrainingRecipe) -> Iterator[StepTracer]:
    """A tracer whose model is built; the build's events are the first.

    Raises:
        LigerprofError: as `simulate_step` does.
    """
    require_supported(recipe, command="simulate", simulated=True)
    require_packages(recipe, command="simulate", simulated=True)
    tracer = StepTracer(recipe, parse_allocator_settings(recipe.alloc_conf))
    recorder = StorageRecorder(tracer.device)
    with (
        collector_paused(),
        simulated_process(recipe.gpu_spec, recorder, set(), packed=recipe.packing),
        FakeTensorMode(),
        recorder,
        model_failures_in_a_line(recipe, AllocatorFullError),
        built_model(recipe, STAND_IN) as model,
        providers_take_cpu_for_cuda(),
    ):
        tracer.start(make_trainer(recipe, model, STAND_IN.type))
        yield tracer
