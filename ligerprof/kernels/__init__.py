"""Fused kernels, pluggable.

`ligerprof.kernels.apply(model, "flce,rms")` puts them into a model; torch is imported only when it is called.
"""

from typing import TYPE_CHECKING, Any

from ligerprof.kernels.registry import find_kernel, list_kernels, load_registry
from ligerprof.kernels.selection import select_kernels
from ligerprof.kernels.slots import KERNEL_NAMES
from ligerprof.kernels.spec import KernelMemory, KernelShape, KernelSpec

if TYPE_CHECKING:
    from ligerprof.kernels.patching.apply import Patch, apply

__all__ = [
    "KERNEL_NAMES",
    "KernelMemory",
    "KernelShape",
    "KernelSpec",
    "Patch",
    "apply",
    "find_kernel",
    "list_kernels",
    "load_registry",
    "select_kernels",
]


def __getattr__(name: str) -> Any:
    if name not in ("Patch", "apply"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ligerprof.kernels.patching import apply as patching

    return getattr(patching, name)
