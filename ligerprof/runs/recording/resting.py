"""Follow a loop while the history is off: by its optimizers' updates, and by the stack when memory runs out."""

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from time import monotonic
from types import CodeType, FrameType
from typing import Any
from weakref import ref

import torch
from torch import nn

from ligerprof.roles import Phase
from ligerprof.runs.recording.backward_entries import sequence_number
from ligerprof.runs.recording.patches import PHASES
from ligerprof.runs.recording.seen import Seen

_bindings: Any = torch._C
# the number of the backward pass inside which this thread runs, -1 outside of any
_backward_number: Callable[[], int] = getattr(_bindings, "_current_graph_task_id", lambda: -1)


class Updates:
    """Counts steps at their updates, which takes one hook per optimizer and no other.

    Updates between which autograd made no node belong to one step: those of several optimizers, or of one that updates
    its groups one after another. So do those inside one backward pass.

    Attributes:
        steps: the number of steps that had an update.
        then: callback after an update.
        rests_until: before this step, `then` is only called when it is due.
        due: that time, by `time.monotonic`.
        optimizers: those that have stepped.
    """

    def __init__(self, then: Callable[[], None]) -> None:
        self.steps, self.then = 0, then
        self.rests_until, self.due = 0, 0.0
        self.optimizers: Seen[Any] = Seen()
        self._place: int | None = None
        self._last: Callable[[], Any] = lambda: None

    def note(self, optimizer: Any, _arguments: Any, _named: Any) -> None:
        """Note that an optimizer has stepped, on the thread that computes the loss or inside backward."""
        # as `_place`, since each call of Python counts in short steps
        place = _backward_number()
        if place < 0:
            place = -1 - sequence_number()
        if place != self._place:
            self._place = place
            self.steps += 1
        if self._last() is not optimizer:
            self._last = ref(optimizer)
            self.optimizers.add(optimizer)
        if self.steps >= self.rests_until or monotonic() >= self.due:
            self.then()

    def are_over(self) -> bool:
        """Whether this thread has made autograd nodes since the last update, or runs another backward pass."""
        return self._place != _place()


def _place() -> int:
    """A number of this thread that changes with the next node, or the number of the running backward pass."""
    backward = _backward_number()
    return backward if backward >= 0 else -1 - sequence_number()


def phase_on_stack(phase_of: Callable[[nn.Module | None], Phase]) -> Phase | None:
    """The phase in which this thread runs, by the functions on its stack; None if they begin no phase.

    Backward runs on threads of its own, without Python frames; it is then on the stack of the thread that waits for it.

    Args:
        phase_of: the phase of a forward pass or evaluation, by its outermost module, None for an autograd Function.
    """
    phases = dict(_codes_of_phases())
    phase = _innermost_phase(sys._getframe(), phases, phase_of)
    if phase is not None:
        return phase
    others = (frame for thread, frame in sys._current_frames().items() if thread != threading.get_ident())
    waits = any(phases.get(frame.f_code) is Phase.BACKWARD for other in others for frame in _stack(other))
    return Phase.BACKWARD if waits else None


def _innermost_phase(
    frame: FrameType, phases: dict[CodeType, Phase], phase_of: Callable[[nn.Module | None], Phase]
) -> Phase | None:
    found, is_inside = None, False
    for each in _stack(frame):
        phase = phases.get(each.f_code)
        if phase in (Phase.FORWARD, Phase.BACKWARD):
            # modules inside others and in backward, and gradients inside modules, belong to them
            if not is_inside:
                is_inside, found = True, phase_of(each.f_locals.get("self")) if phase is Phase.FORWARD else phase
        elif phase is not None and not (phase is Phase.BUILD and is_inside):
            # an optimizer may compute the loss again
            is_inside, found = is_inside and phase is not Phase.OPTIMIZER, phase
    return found


def _stack(innermost: FrameType) -> list[FrameType]:
    """The frames of a thread, the outermost first."""
    frames = []
    frame: FrameType | None = innermost
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def _codes_of_phases() -> Iterator[tuple[CodeType, Phase]]:
    optimizer: Any = torch.optim.Optimizer
    functions = [
        *((_function(module, path), phase) for module, path, phase in PHASES),
        (nn.Module._wrapped_call_impl, Phase.FORWARD),
        (nn.Module._call_impl, Phase.FORWARD),
        (torch.autograd.Function.apply, Phase.FORWARD),
        (nn.Module._apply, Phase.BUILD),
        (torch.autograd.backward, Phase.BACKWARD),
        (torch.autograd.grad, Phase.BACKWARD),
        (getattr(torch.autograd, "_engine_run_backward", None), Phase.BACKWARD),
        # the function that it makes around the `step` of each class
        (next(filter(inspect.iscode, _code(optimizer.profile_hook_step).co_consts), None), Phase.OPTIMIZER),
    ]
    for function, phase in functions:
        code = function if inspect.iscode(function) else _code(function)
        if code is not None:
            yield code, phase


def _function(module: str, path: str) -> Any:
    """A function of a module, None if it is not imported or another version lacks it."""
    found: Any = sys.modules.get(module)
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _code(function: Any) -> Any:
    return None if function is None else getattr(inspect.unwrap(function), "__code__", None)
