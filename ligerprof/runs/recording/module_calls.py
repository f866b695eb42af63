"""Replace nn.Module.__call__ while modules are recorded, so that they need no hooks."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ligerprof.runs.recording.patches import Patches

RunModule = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], Any]


class Calls:
    """The function that `_call_module` replaces, and what runs modules instead; None: that function."""

    original: Any = nn.Module.__call__
    run: RunModule | None = None


calls = Calls()
_ORIGINAL_CALL: Any = nn.Module.__call__


def _call_module(module: nn.Module, *arguments: Any, **named: Any) -> Any:
    """What replaces nn.Module.__call__; torch.compile follows only its first line, and guards nothing that changes."""
    if torch.compiler.is_compiling():
        return _ORIGINAL_CALL(module, *arguments, **named)
    run = calls.run
    return calls.original(module, *arguments, **named) if run is None else run(module, arguments, named)


def replace_calls(patches: Patches, run: RunModule | None) -> None:
    """Run modules by `run`, which calls `calls.original`, until the patches are undone."""
    calls.original = nn.Module.__call__
    calls.run = run
    patches.replace(nn.Module, "__call__", _call_module)
