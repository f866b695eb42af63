"""Replace nn.Module.__call__ while modules are recorded, so that they need no hooks."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from torch import nn
from torch.compiler import is_compiling, is_dynamo_compiling

from ligerprof.errors import LigerprofError
from ligerprof.runs.recording.patches import Patches

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
    """The function that `_call_module` replaces, and what it does instead of only calling that.

    Attributes:
        run: runs modules, if there is no observer.
        observer: observes modules.
    """

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
    # as `observed_call`, with one Python call less around the module
    running = observer.begin(self, arguments, named)
    try:
        output = direct_call(self)(*arguments, **named)
    except BaseException:
        if running is not None:
            observer.end(running, None, failed=True)
        raise
    if running is not None:
        observer.end(running, output)
    return output


def direct_call(module: nn.Module) -> Callable[..., Any]:
    """The call of a module without torch's outermost function, since each allocation records all Python calls."""
    if _IS_TORCHS and calls.original is _ORIGINAL_CALL and module._compiled_call_impl is None:
        return module._call_impl
    return partial(calls.original, module)


def observed_call(observer: Observer, module: nn.Module, arguments: Arguments, named: Named) -> Any:
    """Call a module that `_call_module` gave to `run`."""
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
    if are_replaced():
        raise LigerprofError(
            "record: this process is recorded already. Leave out `ligerprof run`, or its own recording."
        )
    calls.original = nn.Module.__call__
    calls.run, calls.observer = run, observer
    patches.replace(nn.Module, "__call__", _call_module)


def are_replaced() -> bool:
    """Whether the calls of all modules are ours alone, and no other package has wrapped them since."""
    return vars(nn.Module)["__call__"] is _call_module


def release_calls() -> None:
    """Only call modules from now on, also where another wrapper keeps ours."""
    calls.run = calls.observer = None
