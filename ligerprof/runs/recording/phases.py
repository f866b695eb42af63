"""Detect the phases of a user's training loop through hooks on the model, on backward and on optimizers."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ligerprof.roles import Phase
from ligerprof.runs.recording.saved import SavedTensors
from ligerprof.runs.recording.stamping import Stamper


class LoopPhases:
    """Stamps allocations with the phase of a training loop.

    Forward begins with the model's forward and lasts until backward, so that it includes the loss; backward is
    torch.autograd.backward, which Tensor.backward calls; the optimizer phase is the `step` of any torch optimizer.
    The first forward after an optimizer step begins the next step.
    """

    def __init__(self, emit: Callable[[str], None], saved: SavedTensors | None = None) -> None:
        self._stamper = Stamper(emit, saved)
        self._step, self._phase = 0, Phase.BUILD
        self._phase_before_step = Phase.OUTSIDE
        self._ended = True
        self._in_backward = False
        self._original: Any = None
        self._wrapper: Any = None
        self._handles: list[RemovableHandle] = []
        self._model_hook: RemovableHandle | None = None

    def open(self) -> None:
        """Install the hooks on backward and optimizers; until a model is attached, also on all modules."""
        self._handles += [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._model_hook = register_module_forward_pre_hook(self._first_forward)
        self._wrap_backward()

    def close(self) -> None:
        """Remove all hooks from the model, optimizers and torch."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._remove_model_hook()
        self._stamper.detach()
        autograd: Any = torch.autograd
        # a later wrapper stays in place; ours becomes a pass-through
        if autograd.backward is self._wrapper:
            autograd.backward = self._original
        self._wrapper = None

    def attach(self, model: nn.Module) -> None:
        """Stamp the modules of `model`; the build phase lasts until its weights are on a device."""
        self._remove_model_hook()
        # hooks run in the order of registration: first the phase, then the module's own stamp
        self._handles.append(model.register_forward_pre_hook(lambda _module, _inputs: self._begin_forward()))
        self._stamper.attach(model)
        if self._phase is Phase.BUILD and all(weight.device.type != "cpu" for weight in model.parameters()):
            self._enter(Phase.OUTSIDE)

    def end_step(self) -> None:
        """End the step; the next forward begins another."""
        self._ended = True

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Stamp the events inside a context with a phase."""
        before = self._phase
        if phase is Phase.FORWARD:
            self._begin_step()
        self._enter(phase)
        try:
            yield
        finally:
            if phase is Phase.OPTIMIZER:
                self._ended = True
            # forward ends when backward begins, and the build when any other phase does
            self._enter(Phase.OUTSIDE if before in (Phase.BUILD, Phase.FORWARD) else before)

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._stamper.enter(step=self._step, phase=phase)

    def _begin_step(self) -> None:
        if self._ended:
            self._step, self._ended = self._step + 1, False

    def _begin_forward(self) -> None:
        # reentrant checkpointing of a whole model runs it again inside backward
        if self._in_backward:
            return
        self._begin_step()
        self._enter(Phase.FORWARD)

    def _first_forward(self, module: nn.Module, _inputs: Any) -> None:
        self.attach(module)
        # this call collected the module's hooks before `attach` added to them
        self._begin_forward()

    def _remove_model_hook(self) -> None:
        if self._model_hook is not None:
            self._model_hook.remove()
            self._model_hook = None

    def _before_step(self, _optimizer: Any, _arguments: Any, _named: Any) -> None:
        self._phase_before_step = self._phase
        self._enter(Phase.OPTIMIZER)

    def _after_step(self, _optimizer: Any, _arguments: Any, _named: Any) -> None:
        self._ended = True
        # some loops step inside backward, others inside recorder.phase("optimizer")
        before = self._phase_before_step
        self._enter(before if before in (Phase.BACKWARD, Phase.OPTIMIZER) else Phase.OUTSIDE)

    def _wrap_backward(self) -> None:
        autograd: Any = torch.autograd
        original = self._original = autograd.backward

        @functools.wraps(original)
        def backward(tensors: Any, *arguments: Any, **named: Any) -> Any:
            if self._wrapper is None or self._in_backward:
                return original(tensors, *arguments, **named)
            with self._backward(tensors):
                return original(tensors, *arguments, **named)

        self._wrapper = autograd.backward = backward

    @contextmanager
    def _backward(self, tensors: Any) -> Iterator[None]:
        for loss in [tensors] if isinstance(tensors, Tensor) else tensors:
            self._stamper.label_loss(loss)
        self._in_backward = True
        try:
            with self.phase(Phase.BACKWARD):
                yield
        finally:
            self._in_backward = False
