"""The kernel registry: built-in kernels, plus plug-ins discovered through entry points."""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ligerprof.errors import KernelUnavailableError, UnknownKernelError
from ligerprof.kernels.cross_entropy.spec import SPECS as CE_SPECS
from ligerprof.kernels.gated.spec import SPECS as GATED_SPECS
from ligerprof.kernels.linear_cross_entropy.spec import SPECS as FLCE_SPECS
from ligerprof.kernels.norm.spec import SPECS as NORM_SPECS
from ligerprof.kernels.providers.cce.spec import SPECS as CCE_SPECS
from ligerprof.kernels.providers.liger.spec import SPECS as LIGER_SPECS
from ligerprof.kernels.rope.spec import SPECS as ROPE_SPECS
from ligerprof.kernels.selection import KERNEL_NAMES, SLOTS
from ligerprof.kernels.spec import KernelMemory, KernelShape, KernelSpec
from ligerprof.models import ModelSpec
from ligerprof.text import error_line, printable, short_repr
from ligerprof.words import did_you_mean

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP = "ligerprof.kernels"

# what `--liger` and `--provider` can name
_PROVIDER = re.compile(r"[^\s:+,]+")

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
            broken.append(
                BrokenPlugin(entry_point=printable(f"{plugin.name} = {plugin.value}"), reason=error_line(error))
            )
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
        UnknownKernelError: there is none; the message lists the providers that have one, and broken plug-ins.
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
    raise UnknownKernelError(
        f"provider {short_repr(provider)} has no kernel {short_repr(name)}.{meant} {where}{broken}"
    )


def _kernel_of(kernels: Iterable[KernelSpec], name: str, provider: str) -> KernelSpec | None:
    return next((kernel for kernel in kernels if (kernel.name, kernel.provider) == (name, provider)), None)


def find_kernel_set(providers: Mapping[str, str], model: ModelSpec) -> dict[str, KernelSpec]:
    """The kernels of some slots, and their providers' fused variants of them that apply to the model, by name.

    Args:
        providers: the provider of each slot.

    Raises:
        KernelUnavailableError: a provider has no kernel for its slot, or it does not apply to the model.
    """
    found = {name: find_kernel(name, provider) for name, provider in providers.items()}
    for name, kernel in found.items():
        if (reason := kernel.applies(model)) is not None:
            raise KernelUnavailableError(
                f"kernel {name} of {kernel.provider}: {reason}. Leave {name} out, or choose another provider."
            )
    variants = {(variant, provider) for name, provider in providers.items() for variant in SLOTS[name].fused_variants}
    # the search for plug-ins takes time
    kernels = load_registry().kernels if variants else ()
    fused = (kernel for kernel in kernels if (kernel.name, kernel.provider) in variants)
    return found | {kernel.name: kernel for kernel in fused if kernel.applies(model) is None}


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
        _check_names(kernel)
    return tuple(map(_guarded, kernels))


def _check_names(kernel: KernelSpec) -> None:
    """Raise if a kernel could not be selected or loaded by its names."""
    if kernel.slot not in KERNEL_NAMES:
        raise ValueError(f"kernel {kernel.name!r} fills the slot {kernel.slot!r}; known: {', '.join(KERNEL_NAMES)}")
    names = (kernel.slot, *SLOTS[kernel.slot].fused_variants)
    if kernel.name not in names:
        raise ValueError(f"a kernel of the slot {kernel.slot} is named {kernel.name!r}; known: {', '.join(names)}")
    if not _PROVIDER.fullmatch(kernel.provider):
        raise ValueError(f"provider {kernel.provider!r} must be a word without ':', '+' and ','")
    for entry in (kernel.entry, kernel.reference):
        if not all(entry.partition(":")):
            raise ValueError(f"kernel {kernel.name!r} has the entry {entry!r}; write it as module:function")


def _guarded(kernel: KernelSpec) -> KernelSpec:
    """A plug-in's kernel whose functions fail in one line: a predicate as its reason, the memory as an error."""

    def memory(shape: KernelShape) -> KernelMemory:
        assert kernel.memory is not None
        try:
            stated: Any = kernel.memory(shape)
        except Exception as error:
            raise KernelUnavailableError(
                f"kernel {kernel.name} of {kernel.provider}: its memory raises {error_line(error)}"
            ) from error
        if not isinstance(stated, KernelMemory):
            raise KernelUnavailableError(
                f"kernel {kernel.name} of {kernel.provider}: its memory is {type(stated).__name__}, not KernelMemory"
            )
        return stated

    return replace(
        kernel,
        memory=None if kernel.memory is None else memory,
        applies=_reason_of(kernel.applies),
        unavailable_reason=_reason_of(kernel.unavailable_reason),
    )


def _reason_of(predicate: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
    def reason(subject: Any) -> str | None:
        try:
            return predicate(subject)
        except (Exception, SystemExit) as error:
            return error_line(error)

    return reason
