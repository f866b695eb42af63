"""The kernel registry: built-in kernels, plus plug-ins discovered through entry points."""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ligerprof.errors import KernelUnavailableError
from ligerprof.kernels.cross_entropy.spec import SPECS as CE_SPECS
from ligerprof.kernels.gated.spec import SPECS as GATED_SPECS
from ligerprof.kernels.linear_cross_entropy.spec import SPECS as FLCE_SPECS
from ligerprof.kernels.norm.spec import SPECS as NORM_SPECS
from ligerprof.kernels.providers.cce.spec import SPECS as CCE_SPECS
from ligerprof.kernels.providers.liger.spec import SPECS as LIGER_SPECS
from ligerprof.kernels.rope.spec import SPECS as ROPE_SPECS
from ligerprof.kernels.slots import KERNEL_NAMES, SLOTS
from ligerprof.kernels.spec import KernelSpec
from ligerprof.text import printable, short_repr
from ligerprof.words import did_you_mean

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP = "ligerprof.kernels"

BUILT_IN: tuple[KernelSpec, ...] = (
    *(*ROPE_SPECS, *NORM_SPECS, *GATED_SPECS, *CE_SPECS, *FLCE_SPECS),
    *(*LIGER_SPECS, *CCE_SPECS),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokenPlugin:
    """A plug-in that failed to load: `name = value` of its entry point, and the reason in one line."""

    entry_point: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelRegistry:
    """The available kernels, ordered by slot, and the plug-ins that failed to load."""

    kernels: tuple[KernelSpec, ...]
    broken: tuple[BrokenPlugin, ...] = ()

    @property
    def providers(self) -> tuple[str, ...]:
        """Each provider once, in the order of the kernels."""
        return tuple(dict.fromkeys(kernel.provider for kernel in self.kernels))


@lru_cache(maxsize=1)
def load_registry() -> KernelRegistry:
    """The built-in kernels and those of installed plug-ins, read once per process."""
    # explain of a small recording takes as long as this import and search
    from importlib.metadata import entry_points

    return build_registry(entry_points(group=ENTRY_POINT_GROUP))


def build_registry(plugins: "Iterable[EntryPoint]") -> KernelRegistry:
    """The built-in kernels and those of `plugins`; a plug-in that fails or repeats a kernel is left out and listed."""
    kernels, broken = list(BUILT_IN), []
    for plugin in plugins:
        try:
            # what a plug-in prints does not belong to the command's output
            with redirect_stdout(sys.stderr):
                added = _load_plugin(plugin)
            _require_new(added, kernels)
            kernels.extend(added)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a plug-in may fail in any way, and the other kernels must still load
            reason = printable(" ".join(f"{type(error).__name__}: {error}".split()))
            broken.append(BrokenPlugin(entry_point=printable(f"{plugin.name} = {plugin.value}"), reason=reason))
    ordered = sorted(kernels, key=lambda kernel: KERNEL_NAMES.index(kernel.slot))
    return KernelRegistry(kernels=tuple(ordered), broken=tuple(broken))


def _require_new(added: Sequence[KernelSpec], kernels: Sequence[KernelSpec]) -> None:
    """Raise if a provider would have two kernels of one name."""
    counts = Counter((kernel.name, kernel.provider) for kernel in (*kernels, *added))
    for (name, provider), count in counts.items():
        if count > 1:
            raise ValueError(f"provider {provider!r} has two kernels named {name!r}; uninstall one of the packages")


def list_kernels() -> tuple[KernelSpec, ...]:
    """Every kernel of every provider, in the order of `--liger all`."""
    return load_registry().kernels


def find_kernel(name: str, provider: str = "ligerprof") -> KernelSpec:
    """A provider's kernel of this name.

    Raises:
        KernelUnavailableError: there is none; the message lists the providers that have one, and broken plug-ins.
    """
    # a plug-in cannot replace a built-in kernel
    found = _kernel_of(BUILT_IN, name, provider) or _kernel_of(load_registry().kernels, name, provider)
    if found is not None:
        return found
    registry = load_registry()
    having = [kernel.provider for kernel in registry.kernels if kernel.name == name]
    if having:
        meant, where = did_you_mean(provider, having), f"Providers that have it: {', '.join(having)}."
    else:
        names = tuple(dict.fromkeys(kernel.name for kernel in registry.kernels))
        meant, where = did_you_mean(name, names), f"Kernels: {', '.join(names)}."
    broken = "".join(f" Broken plug-in {item.entry_point}: {item.reason}." for item in registry.broken)
    raise KernelUnavailableError(
        f"provider {short_repr(provider)} has no kernel {short_repr(name)}.{meant} {where}{broken}"
    )


def _kernel_of(kernels: Iterable[KernelSpec], name: str, provider: str) -> KernelSpec | None:
    return next((kernel for kernel in kernels if (kernel.name, kernel.provider) == (name, provider)), None)


def find_kernel_set(providers: Mapping[str, str]) -> dict[str, KernelSpec]:
    """The kernels of some slots, and their providers' fused variants of them, by name.

    Args:
        providers: the provider of each slot.

    Raises:
        KernelUnavailableError: a provider has no kernel for its slot.
    """
    found = {name: find_kernel(name, provider) for name, provider in providers.items()}
    variants = {(variant, provider) for name, provider in providers.items() for variant in SLOTS[name].fused_variants}
    fused = (kernel for kernel in load_registry().kernels if (kernel.name, kernel.provider) in variants)
    return found | {kernel.name: kernel for kernel in fused}


def require_available(spec: KernelSpec, device_kind: str) -> None:
    """Raise KernelUnavailableError if a kernel cannot run on this kind of device."""
    if (reason := spec.unavailable_reason(device_kind)) is not None:
        raise KernelUnavailableError(
            f"kernel {spec.name} of {spec.provider}: {reason}. Run `ligerprof kernels` to see what can run here."
        )


def _load_plugin(plugin: "EntryPoint") -> tuple[KernelSpec, ...]:
    loaded: Any = plugin.load()
    if callable(loaded) and not isinstance(loaded, KernelSpec):
        loaded = loaded()
    kernels = (loaded,) if isinstance(loaded, KernelSpec) else tuple(loaded)
    for kernel in kernels:
        if not isinstance(kernel, KernelSpec):
            raise TypeError(f"{plugin.value} provides {type(kernel).__name__}, not KernelSpec")
        if kernel.slot not in KERNEL_NAMES:
            raise ValueError(f"kernel {kernel.name!r} fills the slot {kernel.slot!r}; known: {', '.join(KERNEL_NAMES)}")
    return kernels
