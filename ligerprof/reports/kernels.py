"""Render `ligerprof kernels`: what each fused kernel replaces, its provider, and where it can run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ligerprof.kernels.device import DEVICE_KINDS
from ligerprof.kernels.registry import KernelRegistry
from ligerprof.kernels.selection import inapplicable_reason
from ligerprof.kernels.slots import SLOTS
from ligerprof.kernels.spec import KernelSpec
from ligerprof.models import ModelSpec
from ligerprof.reports.env import no_gpu_reason
from ligerprof.reports.listing import listing_table
from ligerprof.serialization import document, select

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelState:
    """Whether one kernel can be used here.

    Attributes:
        inapplicable_reason: why the model has no use for the kernel; None if it has, or without a model.
        unavailable_reasons: by kind of device, why the kernel cannot run there, or None.
    """

    kernel: KernelSpec
    inapplicable_reason: str | None
    unavailable_reasons: Mapping[str, str | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelListing:
    """The result of `ligerprof kernels`.

    Attributes:
        model: the model given with --model, or None.
        broken: why plug-ins could not be loaded, by entry point.
    """

    model: ModelSpec | None
    kernels: tuple[KernelState, ...]
    broken: Mapping[str, str]


def list_states(registry: KernelRegistry, model: ModelSpec | None) -> KernelListing:
    """Check for each kernel whether it applies to the model and where it can run."""
    no_gpu = no_gpu_reason()

    def unavailable_reason(kernel: KernelSpec, kind: str) -> str | None:
        # kernels in plain torch are available on `cuda` without checking for a GPU
        return no_gpu if kind == "cuda" and no_gpu is not None else kernel.unavailable_reason(kind)

    states = (
        KernelState(
            kernel=kernel,
            inapplicable_reason=kernel.applies(model) if model is not None else None,
            unavailable_reasons={kind: unavailable_reason(kernel, kind) for kind in DEVICE_KINDS},
        )
        for kernel in registry.kernels
    )
    broken = {plugin.entry_point: plugin.reason for plugin in registry.broken}
    return KernelListing(model=model, kernels=tuple(states), broken=broken)


def kernels_json(listing: KernelListing) -> dict[str, Any]:
    """The object of `ligerprof kernels --json`; `applies` is null without a model."""
    kernels = [
        {
            **select(state, "kernel.name", "kernel.provider", "kernel.slot"),
            "replaces": SLOTS[state.kernel.slot].title,
            "title": state.kernel.title,
            "applies": None if listing.model is None else state.inapplicable_reason is None,
            **select(state, "inapplicable_reason", "unavailable_reasons"),
        }
        for state in listing.kernels
    ]
    broken = [{"entry_point": entry, "reason": reason} for entry, reason in listing.broken.items()]
    model = listing.model.name if listing.model is not None else None
    return document("kernels", {"model": model, "kernels": kernels, "broken_plugins": broken})


def render_kernels(listing: KernelListing) -> "RenderableType":
    """Lay out the listing, at most 100 columns wide, with each reason once below the table."""
    from rich.console import Group
    from rich.text import Text

    found = (reason for state in listing.kernels for reason in state.unavailable_reasons.values() if reason is not None)
    numbers = {reason: number for number, reason in enumerate(dict.fromkeys(found), 1)}
    rows = []
    for state in listing.kernels:
        reasons = state.unavailable_reasons.values()
        cells = ("yes" if reason is None else f"no [{numbers[reason]}]" for reason in reasons)
        rows.append((state.kernel.name, state.kernel.provider, state.kernel.title, *cells))
    return Group(
        _slots_table(listing.model),
        listing_table("kernel", "provider", "how", *DEVICE_KINDS, folded=("how",), rows=rows),
        *(Text(f"[{number}] {reason}") for reason, number in numbers.items()),
        *(Text(f"Broken plug-in {entry}: {reason}", style="red") for entry, reason in listing.broken.items()),
    )


def _slots_table(model: ModelSpec | None) -> "Table":
    if model is None:
        return listing_table("--liger", "replaces", rows=((slot.name, slot.title) for slot in SLOTS.values()))
    rows = [
        (slot.name, slot.title, "yes" if inapplicable_reason(slot.name, model) is None else "no")
        for slot in SLOTS.values()
    ]
    applies = f"applies to {model.name}"
    return listing_table("--liger", "replaces", applies, folded=(applies,), rows=rows)
