"""Detect the phases of a user's training: around models, backward, optimizer steps, and functions that save."""

import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from time import monotonic
from types import CodeType, FrameType
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ligerprof.roles import INFERENCE_PHASES, Phase
from ligerprof.runs.recording.module_calls import (
    are_replaced,
    calls,
    direct_call,
    observed_call,
    release_calls,
    replace_calls,
    sequence_number,
)
from ligerprof.runs.recording.patches import (
    GENERATE,
    PHASES,
    REENTRANT,
    Patches,
    is_outermost_gradient,
    is_traced,
    skip_when_compiling,
)
from ligerprof.runs.recording.saved import SavedTensors
from ligerprof.runs.recording.seen import OutermostCalls, Seen, add_weights, exists, has_weights, tensors_of
from ligerprof.runs.recording.stamping import HOOKS, Stamper
from ligerprof.snapshots.stamp import Stamp

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


# what backward and grad call, for programs that import them by name
_ENGINE = "_engine_run_backward"


class LoopPhases:
    """Stamps allocations with the phase of a training loop.

    Forward begins with the call of a model (the outermost module that runs) and lasts until backward, so that it
    includes the loss; backward is torch.autograd.backward, which Tensor.backward calls, and torch.autograd.grad; the
    optimizer phase is the `step` of any torch optimizer. The first forward after an optimizer step begins the next
    step. A model that runs without gradients is evaluated, generates or scores; functions that gather or write weights
    save.

    Args:
        emit: callback that receives the text of each stamp.
        saved: notes the tensors that autograd saves; None: they are not noted.
        on_step: callback that receives the number of each step when it begins.
        on_phase: callback that receives each phase when it begins.
        names_all_nodes: as of a `Stamper`.
    """

    def __init__(
        self,
        emit: Callable[[str], None],
        saved: SavedTensors | None = None,
        on_step: Callable[[int], None] | None = None,
        on_phase: Callable[[Phase], None] | None = None,
        *,
        names_all_nodes: bool = True,
    ) -> None:
        self._stamper = Stamper(emit, saved, names_all_nodes=names_all_nodes)
        self._on_step, self._on_phase = on_step, on_phase
        self._step, self._phase = 0, Phase.BUILD
        self._phase_before_step, self._text_before_step = Phase.OUTSIDE, ""
        self._ended = True
        self._in_backward = False
        self._had_backward = False
        self._has_optimizer: bool | None = None
        # whether an outermost module runs
        self._is_inside = False
        self._in_optimizer = False
        self._names_modules = False
        # whether the history is on
        self._stamps = True
        self._updates = Updates(self._after_step)
        # while only updates are counted
        self._on_update: Callable[[int], float] | None = None
        self._outermost = OutermostCalls()
        # of the modules that trained on this rank
        self.weights: dict[str, list[int]] = {}
        self._weighed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._patches = Patches()
        self._before_steps: RemovableHandle | None = None
        self._after_steps: RemovableHandle | None = None

    @property
    def step(self) -> int:
        """The number of the last step that began, 0 before the first."""
        return self._step if self._on_update is None else max(self._step, self._updates.steps)

    @property
    def optimizers(self) -> Iterable[Any]:
        """Those that have stepped."""
        return self._updates.optimizers

    @property
    def text(self) -> str:
        """The running stamp."""
        if self._stamps:
            return self._stamper.text
        step, phase = self.moment()
        return f"{Stamp.prefix(step=step, phase=phase)};"

    def open(self, *, modules: bool = True) -> None:
        """Install the hooks.

        Args:
            modules: also stamp each module and autograd node; it can begin later, with `name_modules`.
        """
        self._names_modules = modules
        self._after_steps = register_optimizer_step_post_hook(self._updates.note)
        skip_when_compiling(__name__, Seen.__module__, OutermostCalls.__module__, Updates.__module__, *HOOKS)
        self._follow()

    def _follow(self) -> None:
        self._patches = Patches()
        self._before_steps = register_optimizer_step_pre_hook(self._before_step)
        replace_calls(self._patches, self._run_outermost)
        for name in ("backward", "grad", _ENGINE):
            if hasattr(torch.autograd, name):
                self._patches.wrap(torch.autograd, name, self._around_backward)
        self._patches.wrap(nn.Module, "_apply", self._around_move)
        for name in REENTRANT:
            self._patches.wrap_imported(
                name, "CheckpointFunction.apply", self._outermost.around_checkpoint(self._patches)
            )
        self._patches.around(*GENERATE, self._outermost.generation)
        for module, path, phase in PHASES:
            self._patches.around(module, path, partial(self._during, phase))

    def close(self) -> None:
        """Remove all hooks from models, optimizers and torch."""
        self._unfollow()
        if self._after_steps is not None:
            self._after_steps.remove()
        self._names_modules = False
        self._stamper.close()

    def _unfollow(self) -> None:
        release_calls()
        self._patches.undo()
        if self._before_steps is not None:
            self._before_steps.remove()

    def name_modules(self) -> None:
        """From now on, stamp modules and autograd nodes."""
        self._names_modules = True
        self.stamp(enabled=True)
        self._stamper.detail_until(self._step + 1)
        self._choose_run()

    def stamp(self, *, enabled: bool) -> None:
        """Stamp events from the next phase on; or none, while phases are only followed."""
        self._stamps = enabled

    def rest(self, until: int, on_update: Callable[[int], float]) -> None:
        """Stamp no events, and only count the updates of optimizers, without any other hook.

        Phases are followed again after the first update of the last step. They are followed all the time if the first
        step does not show that updates tell steps apart, as in a program without a torch optimizer.

        Args:
            until: the last step that only has updates counted.
            on_update: callback that receives the number of the step of an update, and returns the time, by
                `time.monotonic`, before which it need not be called again.
        """
        self._stamps = False
        if self._updates.steps == self._step - 1 and self._updates.are_comparable() and are_replaced():
            self._unfollow()
            self._outermost.evaluates = False
            self._on_update = on_update
            self._updates.then, self._updates.rests_until, self._updates.due = self._end_update, until, 0.0

    def _end_update(self) -> None:
        updates = self._updates
        self._step = updates.steps
        if self._on_update is not None:
            updates.due = self._on_update(self._step)
        if self._step >= updates.rests_until:
            self._on_update, updates.then, updates.rests_until = None, self._after_step, 0
            self._ended, self._phase = True, Phase.OUTSIDE
            self._had_backward = self._in_backward = self._is_inside = self._in_optimizer = False
            self._follow()

    def moment(self) -> tuple[int, Phase]:
        """The step and the phase; while only updates are counted, the stack shows the phase."""
        if self._on_update is None:
            return self._step, self._phase
        has_begun = self._updates.steps < self._step or self._updates.are_over()
        running = Phase.FORWARD if has_begun else Phase.OUTSIDE
        phase = phase_on_stack(lambda module: self._outermost.phase_inside(module, running) if module else running)
        if phase is None:
            # a loss outside of the model; clipping computes without gradients
            phase = running if torch.is_grad_enabled() else Phase.OUTSIDE
        has_begun = phase is Phase.FORWARD or (has_begun and phase is not Phase.EVALUATION)
        return max(self._step, self._updates.steps + has_begun), phase

    def attach(self, model: nn.Module) -> None:
        """Stamp the modules of `model`; the build phase lasts until its weights are on a device."""
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

    def _during(self, phase: Phase) -> AbstractContextManager[None] | None:
        """A function of `PHASES`: it does not end steps, and inside another of its phase, it changes nothing."""
        if self._phase is phase:
            return None
        if phase is Phase.SAVING:
            return self._aside(phase)
        if phase is Phase.BACKWARD:
            self._begin_step()
        return self._within(phase)

    @contextmanager
    def _within(self, phase: Phase) -> Iterator[None]:
        self._enter(phase)
        try:
            yield
        finally:
            self._enter(Phase.OUTSIDE)

    @contextmanager
    def _aside(self, phase: Phase) -> Iterator[None]:
        """A phase after which the one before it goes on."""
        before = self._phase
        self._enter(phase)
        try:
            yield
        finally:
            self._enter(before)

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        if self._stamps:
            self._stamper.enter(step=self._step, phase=phase)
        if self._on_phase is not None:
            self._on_phase(phase)

    def _begin_step(self) -> None:
        if self._ended or (self._had_backward and self._updates_itself()):
            self._step, self._ended, self._had_backward = self._step + 1, False, False
            if self._on_step is not None:
                self._on_step(self._step)

    def _updates_itself(self) -> bool:
        """Whether the program has no torch optimizer, so that each backward pass ends a step."""
        if self._has_optimizer is None:
            self._has_optimizer = exists(torch.optim.Optimizer)
        return not self._has_optimizer

    def _choose_run(self) -> None:
        """Inside an outermost module and in backward, modules are stamped and change no phase."""
        if self._is_inside or self._in_backward:
            calls.run, calls.observer = None, self._stamper if self._names_modules else None
        else:
            calls.run, calls.observer = self._run_outermost, None

    def _run_outermost(self, module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Run an outermost module in its phase."""
        if self.passes_on():
            return direct_call(module)(*arguments, **named)
        phase = self._outermost.phase_of(module, self._phase, named)
        if phase is None:
            return self._stamped(module, arguments, named)
        if phase is Phase.FORWARD and (self._ended or self._had_backward):
            self._begin_step()
        after_inference = Phase.OUTSIDE if self._phase is Phase.BUILD else self._phase
        self._enter(phase)
        if self._names_modules and not self._stamper.is_attached(module) and has_weights(module):
            self._stamper.attach(module, fixed=False)
        if phase is Phase.FORWARD and module not in self._weighed:
            self._weighed.add(module)
            add_weights(module, self.weights)
        self._is_inside = True
        self._choose_run()
        failed = True
        try:
            outputs = self._stamped(module, arguments, named)
            failed = False
        finally:
            self._is_inside = False
            self._choose_run()
            if failed and phase is Phase.FORWARD:
                # memory ran out, for example; the program may begin again
                self._enter(Phase.OUTSIDE)
            elif phase in INFERENCE_PHASES:
                self._enter(after_inference)
        if phase is Phase.FORWARD and self._names_modules and has_weights(module):
            self._stamper.label_outputs(outputs)
        return outputs

    def _stamped(self, module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        if not self._names_modules:
            return direct_call(module)(*arguments, **named)
        return observed_call(self._stamper, module, arguments, named)

    def known_tensors(self) -> Iterator[tuple[torch.Tensor, Phase]]:
        """What `tensors_of` finds of the optimizers that have stepped."""
        return tensors_of(self._updates.optimizers)

    def _before_step(self, _optimizer: Any, _arguments: Any, _named: Any) -> None:
        self._has_optimizer = True
        # neither a module nor autograd ran; later, a step may call several optimizers
        if not self._step:
            self._begin_step()
        self._phase_before_step, self._text_before_step = self._phase, self._stamper.text
        self._in_optimizer = True
        self._enter(Phase.OPTIMIZER)

    def _after_step(self) -> None:
        self._ended = True
        self._in_optimizer = False
        # some loops step inside backward, others inside recorder.phase("optimizer")
        before = self._phase_before_step
        self._enter(before if before in (Phase.BACKWARD, Phase.OPTIMIZER) else Phase.OUTSIDE)
        if before is Phase.BACKWARD and self._stamps:
            self._stamper.resume(self._text_before_step)

    def _around_backward(self, original: Any) -> Any:
        def backward(outputs: Any, *arguments: Any, **named: Any) -> Any:
            # a model may differentiate inside its forward pass
            if self._is_inside or self._in_backward or is_compiling() or self.passes_on():
                return original(outputs, *arguments, **named)
            before = self._begin_backward(outputs)
            try:
                return original(outputs, *arguments, **named)
            finally:
                # a gradient that is part of a loss
                goes_on = bool(named.get("create_graph")) and not is_outermost_gradient()
                self._end_backward(before, goes_on=goes_on)

        return backward

    def _around_move(self, original: Any) -> Any:
        """Around what moves and casts weights: a model that is made after the first step is built, too."""

        def apply(module: nn.Module, *arguments: Any, **named: Any) -> Any:
            if self._is_inside or self._phase is Phase.BUILD or self.passes_on():
                return original(module, *arguments, **named)
            with self._aside(Phase.BUILD):
                return original(module, *arguments, **named)

        return apply

    def passes_on(self) -> bool:
        """Whether a call does not concern phases: recomputation in backward, or a trace of torch.compile."""
        return self._in_backward or not self._patches.active or is_traced()

    def _begin_backward(self, outputs: Any) -> Phase:
        """Stamp a backward pass; returns the phase before it."""
        if not self._ended or self._updates.are_over():
            # not the backward pass of another optimizer's loss in the step of one that has stepped
            self._begin_step()
        before = self._phase
        if self._names_modules:
            self._stamper.label_loss(outputs)
        self._in_backward = True
        self._choose_run()
        self._enter(Phase.BACKWARD)
        return before

    def _end_backward(self, before: Phase, *, goes_on: bool) -> None:
        """End a backward pass.

        Args:
            goes_on: whether the phase before it goes on, as with a gradient that is part of a loss.
        """
        self._in_backward = False
        self._choose_run()
        self._had_backward = self._had_backward or not goes_on
        if self._in_optimizer and before is not Phase.BACKWARD:
            # the optimizer computes the loss again
            self._enter(Phase.OPTIMIZER)
        elif goes_on or before not in (Phase.BUILD, Phase.FORWARD):
            self._enter(before)
        else:
            self._enter(Phase.OUTSIDE)
