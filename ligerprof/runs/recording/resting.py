"""Follow a loop while the history is off: by its optimizers' updates, and by the stack when memory runs out."""

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
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
_engine: Any = torch.autograd.Variable._execution_engine
_HAS_NUMBERS = hasattr(_bindings, "_current_graph_task_id")


class Updates:
    """Counts steps at their updates, which takes one hook per optimizer and no other.

    Updates between which autograd made no node belong to one step: those of several optimizers, or of one that updates
    its groups one after another. So do those inside one backward pass. Once a step has had several updates, updates
    between which no backward pass began belong to one step, too: autograd Functions make nodes even without gradients.

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
        self._thread = 0
        # a number that no later backward pass has, None until a step has had several updates
        self._passes: int | None = None
        self._last: Callable[[], Any] = lambda: None

    def note(self, optimizer: Any, _arguments: Any, _named: Any) -> None:
        """Note that an optimizer has stepped, on the thread that computes the loss or inside backward."""
        # as `_place`, since each call of Python counts in short steps
        place = _backward_number()
        if place < 0:
            place = -1 - sequence_number()
        if place != self._place:
            self._place, self._thread = place, threading.get_ident()
            if (self._passes is None and place < 0) or self._began_backward(place):
                self.steps += 1
        elif self._passes is None and _HAS_NUMBERS:
            self._passes = _begin_pass()
        if self._last() is not optimizer:
            self._last = ref(optimizer)
            self.optimizers.add(optimizer)
        if self.steps >= self.rests_until or monotonic() >= self.due:
            self.then()

    def _began_backward(self, running: int) -> bool:
        """Whether a backward pass has begun since the last update; `running` is negative outside of any."""
        before, self._passes = self._passes, running if running >= 0 else _begin_pass()
        # a pass of our own does not count
        return before is None or self._passes > before + (running < 0)

    def are_over(self) -> bool:
        """Whether this thread has made autograd nodes since the last update, or runs another backward pass."""
        return self._place != _place()

    def are_comparable(self) -> bool:
        """Whether the last update was on this thread or inside backward, so that nodes of this thread show the next."""
        return self._place is not None and (self._place >= 0 or self._thread == threading.get_ident())


@cache
def _probe() -> tuple[Any, Any, list[int]]:
    """A tensor, its gradient, and a list of one number, where a backward pass from the tensor puts its own number."""
    with torch.inference_mode(mode=False):
        tensor: Any = torch.zeros((), device="cpu", requires_grad=True)
        gradient = torch.zeros((), device="cpu")
    numbers = [-1]

    def note(_gradient: torch.Tensor) -> None:
        numbers[0] = _backward_number()

    tensor.register_hook(note)
    return tensor, gradient, numbers


def _begin_pass() -> int:
    """Run a backward pass that computes nothing, and return its number, which torch shows only inside of the pass."""
    tensor, gradient, numbers = _probe()
    # torch.autograd.grad may be wrapped
    _engine.run_backward((tensor,), (gradient,), False, False, (tensor,), True, False)  # noqa: FBT003
    return numbers[0]


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

    def is_in_backward(frames: list[FrameType]) -> bool:
        return any(phases.get(frame.f_code) is Phase.BACKWARD for frame in frames)

    frames = _stack(sys._getframe())
    others = [_stack(frame) for thread, frame in sys._current_frames().items() if thread != threading.get_ident()]
    waiting = next(filter(is_in_backward, others), [])
    if _backward_number() >= 0 and not is_in_backward(frames):
        # a hook or a recomputation runs on a thread of backward
        frames = [*waiting, *frames]
    phase = _innermost_phase(frames, phases, phase_of)
    return Phase.BACKWARD if phase is None and waiting else phase


def _innermost_phase(
    frames: list[FrameType], phases: dict[CodeType, Phase], phase_of: Callable[[nn.Module | None], Phase]
) -> Phase | None:
    found, is_inside = None, False
    for each in frames:
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
