"""Replace nn.Module.__call__ while modules are recorded, and find the nodes at which backward enters a module.

Autograd numbers nodes in the order of their creation, and backward runs them in the opposite order. So the nodes of a
module are runs of consecutive numbers, which the calls of other modules interrupt, and backward enters a run at its
highest number. Mostly, that is the node of a module's output, or of a tensor that the next module receives.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_dynamo_compiling

from ligerprof.errors import LigerprofError
from ligerprof.runs.recording.patches import Patches

# nodes that are looked at before a call and at the end; a module rarely makes more outside of the calls of others
_MOST_NODES, _MOST_NODES_AT_END = 200, 10_000
_autograd: Any = torch.autograd
# the number of the next node of this thread
sequence_number: Callable[[], int] = _autograd._get_sequence_nr

Callback = Callable[[Any], None]
# first number, and the one after the last
Gap = tuple[int, int]


class Hook:
    """A callback before any of many nodes runs.

    `Node.register_prehook` makes a dict and a handle for each node, which takes longer than the callback. The hooks of
    a tensor are a dict already, which nodes can share; this tensor only carries it.

    Args:
        callback: receives the gradients of the node, or the first of them.
    """

    __slots__ = ("_carrier",)

    def __init__(self, callback: Callback) -> None:
        with torch.inference_mode(mode=False):
            self._carrier: Any = torch.empty(0, device="cpu", requires_grad=True)
        self._carrier._backward_hooks = {0: callback}

    def put(self, node: Any) -> None:
        """Call back before a node runs."""
        node._register_hook_dict(self._carrier)


class OpenCall:
    """The call of a module while it runs, or the code outside of all modules.

    Args:
        hook: of the nodes at which backward enters the module's own code.
        now: the number of the next node, if it is known.
    """

    # the module's own runs of numbers whose highest node is not found yet
    _gaps: list[Gap] | None = None
    # numbers of the nodes that called modules made
    _inner_starts: list[int] | None = None
    _inner_ends: list[int]

    def __init__(self, hook: Hook, now: int | None = None) -> None:
        self._hook = hook
        self._last = self._boundary = sequence_number() if now is None else now

    def call(self, values: Iterable[Any], hook: Hook) -> "OpenCall":
        """The call of another module with these values."""
        self._last = now = sequence_number()
        if now > self._boundary or self._gaps:
            self._resolve(values, now, self._hook, _MOST_NODES)
        return OpenCall(hook, now)

    def leave_inner(self, now: int) -> None:
        """Note that the called module has returned; `now`: the number of the next node."""
        self._boundary = now
        if now > self._last:
            if self._inner_starts is None:
                self._inner_starts, self._inner_ends = [], []
            self._inner_starts.append(self._last)
            self._inner_ends.append(now)

    def finish(self, values: Any, now: int, hook: Hook | None = None) -> None:
        """Note what the module returns; its nodes get `hook` if it is given."""
        if now <= self._boundary and not self._gaps:
            return
        hook = hook or self._hook
        if isinstance(values, Tensor) and not self._gaps:
            # the usual case, in few steps
            node: Any = values.grad_fn
            if node is not None and node._sequence_nr() == now - 1:
                hook.put(node)
                return
        self._resolve((values,), now, hook, _MOST_NODES_AT_END)

    def _resolve(self, values: Iterable[Any], now: int, hook: Hook, most: int) -> None:
        """Hook the highest node of each gap that the values lead to."""
        roots: list[Any] = []
        _add_roots(values, roots)
        if not self._gaps:
            for node in roots:
                # the usual case: the last node that the module made is the value's
                if node._sequence_nr() == now - 1:
                    hook.put(node)
                    return
        gaps = self._gaps = [] if self._gaps is None else self._gaps
        if now > self._boundary:
            gaps.append((self._boundary, now))
        if not roots:
            return
        highest = self._highest(roots, gaps, most)
        remaining = []
        for gap in gaps:
            number, node = highest.get(gap, (gap[0] - 1, None))
            if node is not None:
                hook.put(node)
            # another value may lead to a higher node
            if number + 1 < gap[1]:
                remaining.append((number + 1, gap[1]))
        self._gaps = remaining

    def _highest(self, pending: list[Any], gaps: list[Gap], most: int) -> dict[Gap, tuple[int, Any]]:
        """The highest node of each gap among the module's own nodes that lead to the pending ones."""
        found: dict[Gap, tuple[int, Any]] = {}
        seen: set[Any] = set()
        lowest = gaps[0][0]
        while pending and len(seen) < most:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            number = node._sequence_nr()
            # what a node reads was made before it
            if number < lowest or self._is_of_inner(number):
                continue
            for gap in gaps:
                if gap[0] <= number < gap[1] and number >= found.get(gap, (number, None))[0]:
                    found[gap] = number, node
            pending.extend(following for following, _ in node.next_functions)
        return found

    def _is_of_inner(self, number: int) -> bool:
        if self._inner_starts is None:
            return False
        place = bisect_right(self._inner_starts, number) - 1
        return place >= 0 and number < self._inner_ends[place]


def _add_roots(values: Iterable[Any], roots: list[Any]) -> None:
    """Add the nodes that computed the tensors in nested containers."""
    for value in values:
        if isinstance(value, Tensor):
            node = value.grad_fn
            if node is not None:
                roots.append(node)
        elif isinstance(value, (tuple, list)):
            _add_roots(value, roots)
        elif isinstance(value, dict):
            _add_roots(value.values(), roots)


Arguments = tuple[Any, ...]
Named = Mapping[str, Any]
RunModule = Callable[[nn.Module, Arguments, Named], Any]


class Observer(Protocol):
    """Receives each call of a module."""

    def begin(self, module: nn.Module, arguments: Arguments, named: Named) -> Any:
        """The call begins; returns what `end` receives, None if this call is not observed."""

    def end(self, running: Any, output: Any, *, failed: bool = False) -> None:
        """The call has ended; one that failed has no output."""


class Calls:
    """The function that `_call_module` replaces, and what it does instead: `run` if nobody observes."""

    original: Any = nn.Module.__call__
    run: RunModule | None = None
    observer: Observer | None = None


calls = Calls()
_ORIGINAL_CALL: Any = nn.Module.__call__
_module: Any = nn.Module
# whether nobody else had replaced it before
_IS_TORCHS = getattr(_module, "_wrapped_call_impl", None) is _ORIGINAL_CALL and hasattr(_module, "_call_impl")


def _call_module(self: nn.Module, *arguments: Any, **named: Any) -> Any:
    """What replaces nn.Module.__call__; torch.compile follows only its first line, and guards nothing that changes.

    Torch's profiler looks for a local variable `self` in frames of nn.Module.__call__, and crashes without one.
    """
    if is_dynamo_compiling():
        return _ORIGINAL_CALL(self, *arguments, **named)
    observer, run = calls.observer, calls.run
    if observer is None:
        # in steps without stamps on modules, each module passes here: two calls more than without a recording
        if run is None or is_compiling():
            return calls.original(self, *arguments, **named)
        return run(self, arguments, named)
    if is_compiling():
        return calls.original(self, *arguments, **named)
    return observed_call(observer, self, arguments, named)


def direct_call(module: nn.Module) -> Callable[..., Any]:
    """The call of a module without torch's outermost function, since each allocation records all Python calls."""
    if _IS_TORCHS and calls.original is _ORIGINAL_CALL and module._compiled_call_impl is None:
        return module._call_impl
    return partial(calls.original, module)


def observed_call(observer: Observer, module: nn.Module, arguments: Arguments, named: Named) -> Any:
    """Call a module between `begin` and `end` of an observer."""
    running = observer.begin(module, arguments, named)
    try:
        output = direct_call(module)(*arguments, **named)
    except BaseException:
        if running is not None:
            observer.end(running, None, failed=True)
        raise
    if running is not None:
        observer.end(running, output)
    return output


def replace_calls(patches: Patches, run: RunModule | None = None, observer: Observer | None = None) -> None:
    """Run or observe modules until the patches are undone.

    Raises:
        LigerprofError: another recording of this process does already; each would call the other.
    """
    if vars(nn.Module)["__call__"] is _call_module:
        raise LigerprofError(
            "record: this process is recorded already. Leave out `ligerprof run`, or its own recording."
        )
    calls.original = nn.Module.__call__
    calls.run, calls.observer = run, observer
    patches.replace(nn.Module, "__call__", _call_module)


def release_calls() -> None:
    """Only call modules from now on, also where another wrapper keeps ours."""
    calls.run = calls.observer = None
