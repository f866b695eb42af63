"""Trace what training steps allocate and free for batches of any shape, with one model on the simulated GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from ligerprof.recipe.lengths import BatchShape, recipe_of
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.simulated.rank import GPU, machine_for, simulated_trainer
from ligerprof.runs.training import Trainer, make_batch
from ligerprof.torch_memory.allocator.caching import CachingAllocator


class StepTracer:
    """Runs parts of training steps and returns what each allocated and freed.

    Attributes:
        events: (address, size) of an allocation, (address, 0) of a free, since the last `take`.
        allocator: what all parts ran on, without a limit.
    """

    def __init__(self, recipe: TrainingRecipe, allocator: CachingAllocator) -> None:
        self._recipe = recipe
        self.allocator = allocator
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
        batch = make_batch(recipe_of(self._recipe, shape), GPU)
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
    """A tracer whose model is built on this process's simulated GPU; the build's events are the first.

    Raises:
        LigerprofError: as `simulate_step` does.
    """
    device = machine_for(recipe, endless=True).device
    tracer = StepTracer(recipe, device.allocator)
    device.observer = tracer.observe
    with simulated_trainer(recipe) as trainer:
        tracer.start(trainer)
        yield tracer
