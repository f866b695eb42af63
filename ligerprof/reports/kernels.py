"""How fused kernels are listed: what each replaces, whose there are, and where each can run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ligerprof.kernels.device import DEVICE_KINDS
from ligerprof.kernels.registry import KernelRegistry
from ligerprof.kernels.selection import inapplicable_reason
from ligerprof.kernels.slots import SLOTS
from ligerprof.kernels.spec import KernelSpec
from ligerprof.models import ModelSpec
from ligerprof.reports.env import no_gpu_reason
from ligerprof.reports.listing import add_listing_row, listing_table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelState:
    """One kernel and what stands against it here.

    Attributes:
        inapplicable: why the model asked about has no use for it, None where it has or none was asked about.
        unavailable: kind of device to the reason why it cannot run there, None where it can.
    """

    kernel: KernelSpec
    inapplicable: str | None
    unavailable: Mapping[str, str | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelListing:
    """Everything `ligerprof kernels` prints.

    Attributes:
        model: the model asked about, or None.
        broken: plug-ins that could not be loaded: entry point to reason.
    """

    model: ModelSpec | None
    kernels: tuple[KernelState, ...]
    broken: Mapping[str, str]


def list_states(registry: KernelRegistry, model: ModelSpec | None) -> KernelListing:
    """Ask every kernel whether it fits the model and what keeps it from running here."""
    no_gpu = no_gpu_reason()
    states = (
        KernelState(
            kernel=kernel,
            inapplicable=kernel.applies(model) if model is not None else None,
            unavailable={kind: _unavailable_reason(kernel, kind, no_gpu) for kind in DEVICE_KINDS},
        )
        for kernel in registry.kernels
    )
    return KernelListing(
        model=model, kernels=tuple(states), broken={plugin.entry_point: plugin.reason for plugin in registry.broken}
    )


def _unavailable_reason(kernel: KernelSpec, kind: str, no_gpu: str | None) -> str | None:
    # plain torch runs on CUDA wherever there is a GPU: a kernel need not know whether there is
    return no_gpu if kind == "cuda" and no_gpu is not None else kernel.unavailable_reason(kind)


def kernels_json(listing: KernelListing) -> dict[str, Any]:
    """The object of `ligerprof kernels --json`; `applies` is null where no model was asked about."""
    return {
        "schema": 1,
        "kind": "kernels",
        "model": listing.model.name if listing.model is not None else None,
        "kernels": [
            {
                "name": state.kernel.name,
                "provider": state.kernel.provider,
                "slot": state.kernel.slot,
                "replaces": SLOTS[state.kernel.slot].title,
                "title": state.kernel.title,
                "applies": None if listing.model is None else state.inapplicable is None,
                "inapplicable_reason": state.inapplicable,
                "unavailable_reasons": dict(state.unavailable),
            }
            for state in listing.kernels
        ],
        "broken_plugins": [{"entry_point": entry, "reason": reason} for entry, reason in listing.broken.items()],
    }


def render_kernels(listing: KernelListing) -> "RenderableType":
    """Lay the listing out, at most 100 columns wide, every reason once below the table."""
    from rich.console import Group
    from rich.text import Text

    reasons = _numbered_reasons(listing.kernels)
    return Group(
        _slots_table(listing.model),
        _kernels_table(listing, reasons),
        *(Text(f"[{number}] {reason}") for reason, number in reasons.items()),
        *(Text(f"Broken plug-in {entry}: {reason}", style="red") for entry, reason in listing.broken.items()),
    )


def _numbered_reasons(states: Sequence[KernelState]) -> dict[str, int]:
    reasons = dict.fromkeys(reason for state in states for reason in state.unavailable.values() if reason is not None)
    return {reason: number for number, reason in enumerate(reasons, 1)}


def _slots_table(model: ModelSpec | None) -> "Table":
    if model is None:
        table = listing_table("--liger", "replaces")
        for slot in SLOTS.values():
            add_listing_row(table, slot.name, slot.title)
        return table
    applies = f"applies to {model.name}"
    table = listing_table("--liger", "replaces", applies, folded=(applies,))
    for slot in SLOTS.values():
        add_listing_row(table, slot.name, slot.title, "yes" if inapplicable_reason(slot.name, model) is None else "no")
    return table


def _kernels_table(listing: KernelListing, reasons: Mapping[str, int]) -> "Table":
    table = listing_table("kernel", "provider", "how", *DEVICE_KINDS, folded=("how",))
    for state in listing.kernels:
        cells = ("yes" if reason is None else f"no [{reasons[reason]}]" for reason in state.unavailable.values())
        add_listing_row(table, state.kernel.name, state.kernel.provider, state.kernel.title, *cells)
    return table
