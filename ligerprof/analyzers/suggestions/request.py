"""The allocation that failed: its size, its role if an earlier one was alike, and what was available for it."""

from dataclasses import dataclass

import numpy as np

from ligerprof.analyzers.attribution.blocks import Attribution
from ligerprof.analyzers.attribution.stacks import StackReader
from ligerprof.roles import Role
from ligerprof.snapshots.distinct import is_among
from ligerprof.torch_memory.allocator.settings import SizeRules


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """An allocation that failed.

    Attributes:
        moment: the moment before it.
        size_bytes: of the block that it needed.
        role: the role of an earlier allocation by the same stack, None if there is none.
        limit_bytes: allocated bytes that fit: what was reserved, and what the device had left if that was too little.
    """

    moment: int
    size_bytes: int
    role: Role | None
    limit_bytes: int


def find_request(attribution: Attribution, event: int, peak_moment: int) -> Request:
    """Read the failed allocation's event."""
    replayed = attribution.replayed
    found = replayed.trace[event]
    requested, device_free = (found.get(key) for key in ("size", "device_free"))
    requested_bytes = requested if type(requested) is int else 0
    free_bytes = device_free if type(device_free) is int else 0
    # with more than that on the device, a limit on the process was reached
    available = free_bytes if free_bytes < requested_bytes else 0
    return Request(
        moment=event,
        size_bytes=SizeRules().round_request(requested_bytes),
        role=_role(attribution, found.get("frames"), peak_moment),
        limit_bytes=int(replayed.reserved_bytes[: event + 1].max()) + available,
    )


def _role(attribution: Attribution, frames: object, peak_moment: int) -> Role | None:
    stack = StackReader().read(frames)
    if not stack.calls:
        return None
    sites = [number for number, site in enumerate(attribution.call_sites.sites) if site.stack.calls == stack.calls]
    blocks = np.flatnonzero(is_among(attribution.call_sites.site_of, sites))
    return attribution.roles_of(blocks[-1:], peak_moment)[0] if len(blocks) else None
