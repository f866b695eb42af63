"""Fused kernels, pluggable.

`ligerprof.kernels.apply(model, "flce,rms")` puts them into a model; torch is imported only when it is called.
Each name is loaded on first use.
"""

from typing import TYPE_CHECKING

from ligerprof.lazy_names import lazy_names

if TYPE_CHECKING:
    from ligerprof.kernels.patching.apply import Patch, apply
    from ligerprof.kernels.registry import find_kernel, list_kernels, load_registry
    from ligerprof.kernels.selection import KERNEL_NAMES, select_kernels
    from ligerprof.kernels.spec import KernelMemory, KernelShape, KernelSpec

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

_HOMES = {
    "KERNEL_NAMES": "selection",
    "KernelMemory": "spec",
    "KernelShape": "spec",
    "KernelSpec": "spec",
    "Patch": "patching.apply",
    "apply": "patching.apply",
    "find_kernel": "registry",
    "list_kernels": "registry",
    "load_registry": "registry",
    "select_kernels": "selection",
}

__getattr__ = lazy_names(__name__, _HOMES)
