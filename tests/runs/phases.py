"""An observer of training steps that keeps their losses."""

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from ligerprof.roles import Phase


class NoPhases:
    """Ignores phases.

    Attributes:
        losses: the loss of each micro-batch.
    """

    def __init__(self) -> None:
        self.losses: list[float] = []

    def phase(self, _phase: Phase) -> AbstractContextManager[None]:
        return nullcontext()

    def loss_made(self, loss: Tensor) -> None:
        self.losses.append(loss.item())
