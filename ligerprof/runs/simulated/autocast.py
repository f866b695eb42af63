"""Autocast fake CPU tensors by CUDA's rules.

torch.autocast("cuda") disables itself without CUDA, so the simulator uses torch.autocast("cpu"). Its operator lists
differ; during a simulation, CUDA's lists from torch_memory/autocast.py replace them.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ligerprof.torch_memory.autocast import FP32, FP32_RESULT, LOWER, WIDEST

Operator = Callable[..., Any]
Caster = Callable[[Operator], Operator]

_KEY = "AutocastCPU"
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

# on the CPU lists only
_CPU_ALONE = ("cat", "cross_entropy_loss", "index_copy", "stack")


def register(library: torch.library.Library) -> None:
    """Register CUDA's lists for the CPU key until the library is destroyed."""
    for names, caster in ((FP32, _in_fp32), (FP32_RESULT, _to_fp32), (WIDEST, _in_widest), (LOWER, _in_lower)):
        for name in names:
            _override(library, name, caster(_operator(name)))
    for name in _CPU_ALONE:
        _override(library, name, torch.library.fallthrough_kernel)


def _override(library: torch.library.Library, name: str, function: Any) -> None:
    with warnings.catch_warnings():
        # the override is intended
        warnings.filterwarnings("ignore", message=".*only once for all operators", category=UserWarning)
        library.impl(name, function, _KEY, allow_override=True)  # type: ignore[no-untyped-call]


def _operator(name: str) -> Operator:
    packet, _, overload = name.partition(".")
    operator: Operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return operator


def _eligible(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_cast(item, dtype) for item in value)
    return value.to(dtype) if _eligible(value) else value


def _call(operator: Operator, args: Any, kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        return operator(*_cast(args, dtype), **{name: _cast(value, dtype) for name, value in kwargs.items()})


def _in_fp32(operator: Operator) -> Operator:
    return lambda *args, **kwargs: _call(operator, args, kwargs, torch.float32)


def _in_lower(operator: Operator) -> Operator:
    return lambda *args, **kwargs: _call(operator, args, kwargs, torch.get_autocast_dtype("cpu"))


def _in_widest(operator: Operator) -> Operator:
    def run(*args: Any, **kwargs: Any) -> Any:
        floats = [value.dtype for value in (*args, *kwargs.values()) if _eligible(value)]
        widest = torch.float32 if torch.float32 in floats else torch.get_autocast_dtype("cpu")
        return _call(operator, args, kwargs, widest)

    return run


def _to_fp32(operator: Operator) -> Operator:
    """Request an fp32 result unless the caller passed a dtype (fp32_set_opt_dtype)."""

    def run(*args: Any, **kwargs: Any) -> Any:
        names = [argument.name for argument in operator._schema.arguments]  # type: ignore[attr-defined]
        given = dict(zip(names, args, strict=False)) | kwargs
        if given.get("dtype") is None and _eligible(args[0]):
            given["dtype"] = torch.float32
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return operator(**given)

    return run
