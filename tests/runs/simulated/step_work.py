"""Count the work of a recipe's step on the simulated GPU, as the oracle of the estimate's account."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ligerprof.analyzers.step_time.rates import Ledger, Part
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Phase
from ligerprof.runs.outcome import Progress
from ligerprof.runs.simulated.rank import GPU, machine_for, simulated_trainer
from ligerprof.runs.simulated.work import OperatorCounter, _backward_part
from ligerprof.runs.training import make_batch, train_step
from ligerprof.simulated_gpu.values import tensors_in


def count_here(recipe: TrainingRecipe, progress: Progress) -> Ledger:
    """The work of a steady step, in a process that has not simulated before and ends afterwards.

    Raises:
        LigerprofError: as `simulate_step` does.
    """
    # from the second micro-batch on, gradients are added to those before
    micro_batches = min(recipe.grad_accum, 2)
    machine = machine_for(recipe, endless=True)
    progress(f"counting the work of {recipe.spec.name} on a simulated {recipe.gpu_spec.title}")
    with simulated_trainer(dataclasses.replace(recipe, grad_accum=micro_batches)) as trainer:
        batch = make_batch(recipe, GPU)
        counter = WorkCounter(trainer.model)
        train_step(trainer, batch, counter)
        counter.ledgers.clear()
        counter.install(machine)
        train_step(trainer, batch, counter)
    whole = Ledger()
    for ledger, times in zip(counter.ledgers, (1, recipe.grad_accum - 1), strict=False):
        whole.add_all(ledger, times)
    for ledger in counter.ledgers[micro_batches:]:
        whole.add_all(ledger)
    return whole


class WorkCounter(OperatorCounter):
    """Observes training steps: a ledger per micro-batch, and one for the optimizer.

    Args:
        model: has a list of layers; what runs after the last one and before its gradient is there is the loss.
    """

    def __init__(self, model: nn.Module) -> None:
        self.ledgers: list[Ledger] = []
        self._phase: Phase | None = None
        self._in_loss = False
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
        if lists:
            max(lists, key=len)[-1].register_forward_hook(self._last_layer)

    def _last_layer(self, _layer: nn.Module, _arguments: Any, output: Any) -> None:
        hidden = next(iter(tensors_in(output)))
        if self._phase is Phase.FORWARD:
            self._in_loss = True
            if hidden.requires_grad:
                hidden.register_hook(self._gradient_arrives)  # type: ignore[no-untyped-call]

    def _gradient_arrives(self, _gradient: Tensor) -> None:
        self._in_loss = False

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """A phase of the step."""
        if phase in (Phase.FORWARD, Phase.OPTIMIZER):
            self.ledgers.append(Ledger())
            self._in_loss = False
        self._phase, self.ledger = phase, self.ledgers[-1]
        yield
        self._phase = self.ledger = None

    def loss_made(self, loss: Tensor) -> None:
        """Do nothing: the loss is known by the last layer."""

    def part(self) -> Part:
        """The part of the step that runs."""
        if self._phase is Phase.OPTIMIZER:
            return Part.OPTIMIZER
        if self._in_loss:
            return Part.LOSS
        return Part.FORWARD if self._phase is Phase.FORWARD else _backward_part()
