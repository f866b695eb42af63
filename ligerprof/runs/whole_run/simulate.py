"""Run every step of a pass over the data through one allocator: the peaks of the whole run, fragmentation included."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
from torch import Tensor

from ligerprof.errors import UnsupportedError
from ligerprof.recipe.conflicts import require_packages, require_positions, require_supported
from ligerprof.recipe.lengths import BatchShape, recipe_of, require_simulated_run, run_shapes
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.outcome import Progress
from ligerprof.runs.simulated.rank import GPU, machine_for, simulated_trainer
from ligerprof.runs.simulated.server import apart
from ligerprof.runs.simulated.worker import worker
from ligerprof.runs.training import Trainer, make_batch
from ligerprof.runs.whole_run.programs import Ledger, Program, Programs, Trace, known_counts
from ligerprof.runs.whole_run.replay import Replay, WholeRun
from ligerprof.torch_memory.allocator.caching import CachingAllocator


class StepTracer:
    """Runs parts of training steps and returns what each allocated and freed.

    Attributes:
        events: (address, size) of an allocation, (address, 0) of a free, since the last `take`.
        allocator: what all parts ran on, without a limit.
        trainer: what trains, once it is built.
    """

    trainer: Trainer

    def __init__(self, recipe: TrainingRecipe, allocator: CachingAllocator) -> None:
        self._recipe, self.allocator = recipe, allocator
        self.events: list[tuple[int, int]] = []
        self._loss: Tensor | None = None

    def observe(self, action: str, address: int, size_bytes: int, _context: object) -> None:
        if action == "alloc":
            self.events.append((address, size_bytes))
        elif action == "free_completed":
            self.events.append((address, 0))

    def take(self) -> list[tuple[int, int]]:
        taken, self.events = self.events, []
        return taken

    def micro_batch(self, shape: BatchShape) -> None:
        """Run forward and backward on a batch of a shape, which is gone afterwards."""
        batch = make_batch(recipe_of(self._recipe, shape), GPU)
        self._loss = self.trainer.forward(batch)
        self.trainer.backward(self._loss)
        # as train_step does: what the graph holds ends with the backward pass
        self._loss = self._loss.detach()

    def update(self) -> None:
        self.trainer.update()
        self.trainer.drop_gradients()
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
    with simulated_trainer(recipe) as tracer.trainer:
        yield tracer


def simulate_run(recipe: TrainingRecipe, progress: Progress) -> WholeRun:
    """Simulate one pass over the recipe's file of lengths, under its memory limit, in another process.

    A micro-batch's tensors are there from the start of its forward pass to the end of its backward pass.

    Raises:
        LigerprofError: what `simulate_step` and `run_shapes` raise.
        UnsupportedError: sizes that follow no known function of the length, or allocator settings that are not covered.
    """
    require_simulated_run(recipe)
    shapes = run_shapes(recipe)
    require_positions(recipe)
    require_supported(recipe, command="simulate", simulated=True)
    require_packages(recipe, command="simulate", simulated=True)
    progress(f"tracing steps of {recipe.spec.name} for {len(shapes.steps):,} steps of the run")
    found: WholeRun = worker().run("ligerprof.runs.whole_run.simulate:run_here", recipe, progress)
    return found


def run_here(recipe: TrainingRecipe, progress: Progress) -> WholeRun:
    """`simulate_run` in this process, which has not simulated before and ends afterwards."""
    shapes = run_shapes(recipe)
    first = shapes.steps[0]
    # of a second model, whose process may not have had a first one
    whole_first_step = apart(partial(_first_step, recipe, first, progress)) if len(first) > 2 else None
    with step_tracer(recipe) as tracer:
        parts = _Parts(tracer, progress, accumulates=recipe.grad_accum > 1)
        start = parts.start(first[:2])
        # a step after the first one is needed before steps are alike
        parts.steady(first[0])
        wanted = [*first[1:], *(shape for step in shapes.steps[1:] for shape in step)]
        programs = Programs(parts.steady, wanted, known_counts(recipe, shapes.longest))
    others: list[tuple[Program, int]] = []
    if whole_first_step is not None:
        found = _others_of_first_step(first, start[-2], programs)
        if found is None:
            start = whole_first_step()
        else:
            others = found
    *before, update = [(trace.program, 0) for trace in start]
    return Replay(recipe, shapes, programs, progress).run([*before, *others, update])


def _first_step(recipe: TrainingRecipe, shapes: Sequence[BatchShape], progress: Progress) -> list[Trace]:
    """The build and all of the first step."""
    with step_tracer(recipe) as tracer:
        return _Parts(tracer, progress, accumulates=True).start(shapes)


def _others_of_first_step(
    shapes: Sequence[BatchShape], second: Trace, programs: Programs
) -> list[tuple[Program, int]] | None:
    """The first step's micro-batches after the second one; None if they are not those of later steps.

    They free the same blocks as in later steps, but numbered differently, because optimizer states do not exist yet.
    """
    located = [programs.program(shape, 1) for shape in shapes[1:]]
    like = located[0][0]
    numbers = {
        later: here for later, here in zip(like.operations.tolist(), second.operations, strict=False) if later < 0
    }
    renumbered = {}
    for program in dict.fromkeys(program for program, _ in located):
        operations = program.operations.tolist()
        if any(number < 0 and number not in numbers for number in operations):
            return None
        operations = [numbers.get(number, number) for number in operations]
        renumbered[program] = replace(program, operations=np.array(operations, np.int32))
    if renumbered[like].operations.tolist() != list(second.operations):
        return None
    return [(renumbered[program], column) for program, column in located[1:]]


class _Parts:
    """Traces parts of steps in the order of training."""

    def __init__(self, tracer: StepTracer, progress: Progress, *, accumulates: bool) -> None:
        self._tracer, self._progress = tracer, progress
        self._acts = (tracer.micro_batch,) * (1 + accumulates)
        self._ledger = Ledger()
        self._seen: dict[int, int] = {}

    def start(self, shapes: Sequence[BatchShape]) -> list[Trace]:
        """The build and the first step."""
        traces = [self._take()]
        for shape in shapes:
            self._tracer.micro_batch(shape)
            traces.append(self._take())
        self._tracer.update()
        return [*traces, self._take()]

    def steady(self, shape: BatchShape) -> tuple[Trace, ...]:
        """A step on micro-batches of a shape: the first, which makes gradients, perhaps a later one, and the update."""
        self._progress(f"tracing {shape.rows} x {shape.tokens} tokens")
        found: list[Trace] = []
        for act in self._acts:
            self._expect(len(found))
            act(shape)
            found.append(self._take())
        self._expect(len(found))
        self._tracer.update()
        return (*found, self._take())

    def _expect(self, part: int) -> None:
        """Traces refer to held blocks by number, so that as many must be held before each part."""
        held = self._ledger.count
        if self._seen.setdefault(part, held) != held:
            raise UnsupportedError("--lengths: a step leaves other blocks behind than the one before.")

    def _take(self) -> Trace:
        return self._ledger.trace(self._tracer.take())
