"""Decide whether the call of an outermost module trains a model, evaluates it, generates, or scores."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
        self._generates = self._has_generated = False
        self._trained: Seen[nn.Module] = Seen()

    def phase_of(self, module: nn.Module, running: Phase, named: Mapping[str, Any]) -> Phase | None:
        """The phase that the call of an outermost module begins or continues; None: the running one goes on.

        Without gradients, a model generates inside `generate`, or where it is given its cache. What runs after that, up
        to the next forward pass, scores what was generated, and so does a reference between forward and backward. Any
        other model is evaluated. Frozen models, such as a teacher or an image encoder, belong to the forward pass that
        they precede. A model that has been trained is evaluated in evaluation mode even with gradients.

        Args:
            module: the outermost module.
            running: the phase before it.
            named: the keyword arguments of the call.
        """
        with_gradients = torch.is_grad_enabled() or self.is_checkpointed
        if running is Phase.SAVING:
            return None
        if with_gradients and module.training and module in self._trained:
            self.evaluates = self._has_generated = False
            return Phase.FORWARD
        if not has_weights(module):
            # a loss or a metric
            return Phase.EVALUATION if self.evaluates and not with_gradients else None
        if not with_gradients and (
            self._generates or named.get("use_cache") or named.get("past_key_values") is not None
        ):
            self._has_generated = True
            return Phase.GENERATION
        if not with_gradients and (running is Phase.FORWARD or self._has_generated):
            return Phase.SCORING
        if with_gradients and module.training:
            self._trained.add(module)
            self._has_generated = False
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
        if module in self._trained and not self._generates:
            return Phase.FORWARD if module.training else Phase.EVALUATION
        found = self.phase_of(module, running, {})
        return running if found is None or (found is Phase.SCORING and running is Phase.FORWARD) else found

    @contextmanager
    def generation(self) -> Iterator[None]:
        """The calls inside generate."""
        before, self._generates = self._generates, True
        try:
            yield
        finally:
            self._generates = before

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
