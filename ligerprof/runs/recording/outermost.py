"""Decide whether the call of an outermost module trains or evaluates a model."""

from typing import Any

import torch
from torch import nn

from ligerprof.roles import Phase
from ligerprof.runs.recording.patches import Patches
from ligerprof.runs.recording.seen import Seen, has_weights


class OutermostCalls:
    """The models that were trained so far, and what the last call of an outermost module was.

    Attributes:
        is_checkpointed: whether a reentrant checkpoint runs, which switches gradients off until backward.
        evaluates: whether the last model was evaluated.
    """

    def __init__(self) -> None:
        self.is_checkpointed = self.evaluates = False
        self._trained: Seen[nn.Module] = Seen()

    def phase_of(self, module: nn.Module, running: Phase) -> Phase | None:
        """The phase that the call of an outermost module begins or continues; None: the running one goes on.

        Without gradients, a model is evaluated, except between forward and backward, where it is a reference. Frozen
        models, such as a teacher or an image encoder, belong to the forward pass that they precede. A model that has
        been trained is evaluated in evaluation mode even with gradients.
        """
        with_gradients = torch.is_grad_enabled() or self.is_checkpointed
        if running is Phase.SAVING:
            return None
        if with_gradients and module.training and module in self._trained:
            self.evaluates = False
            return Phase.FORWARD
        if not has_weights(module):
            # a loss or a metric
            return Phase.EVALUATION if self.evaluates and not with_gradients else None
        if running is Phase.FORWARD and not with_gradients:
            return None
        if with_gradients and module.training:
            self._trained.add(module)
        if with_gradients:
            evaluates = not module.training and module in self._trained
        else:
            evaluates = self.evaluates or has_weights(module, trainable=True)
        self.evaluates = evaluates
        return Phase.EVALUATION if evaluates else Phase.FORWARD

    def phase_inside(self, module: nn.Module, running: Phase) -> Phase:
        """The phase of a moment inside the call of an outermost module, whose begin was not noted.

        Whether gradients are on says less there: autograd Functions and reentrant checkpoints switch them off.
        """
        if module in self._trained:
            return Phase.FORWARD if module.training else Phase.EVALUATION
        return self.phase_of(module, running) or running

    def around_checkpoint(self, patches: Patches) -> Any:
        """What makes a wrapper around the function that runs a reentrant checkpoint."""

        def make(original: Any) -> Any:
            def apply(*arguments: Any) -> Any:
                if not patches.active:
                    return original(*arguments)
                before, self.is_checkpointed = self.is_checkpointed, torch.is_grad_enabled()
                try:
                    return original(*arguments)
                finally:
                    self.is_checkpointed = before

            return apply

        return make
