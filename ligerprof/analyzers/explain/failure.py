"""Decide why an allocation did not fit: too much held, or the free parts too small."""

from collections import defaultdict
from collections.abc import Sequence

from ligerprof.analyzers.attribution.blocks import Owner
from ligerprof.analyzers.explain.parts import OutOfMemory, Pin
from ligerprof.roles import Role
from ligerprof.snapshots.events import DeviceState
from ligerprof.snapshots.replay import Replay

_PINS = 10


def judge_out_of_memory(replayed: Replay, event: int, state: DeviceState, owners: Sequence[Owner]) -> OutOfMemory:
    """Judge the state that an OOM event found.

    Args:
        event: the OOM's index in the trace.
        state: what the device held then.
        owners: of the blocks that were alive.
    """
    entry = replayed.trace[event]
    requested, device_free = entry.get("size"), entry.get("device_free")
    asked = requested if type(requested) is int else 0
    free_bytes = sum(state.space.starts.values())
    largest = max(state.space.starts.values(), default=0)
    return OutOfMemory(
        requested_bytes=asked,
        allocated_bytes=int(replayed.allocated_bytes[event]),
        reserved_bytes=int(replayed.reserved_bytes[event]),
        reserved_free_bytes=free_bytes,
        largest_free_bytes=largest,
        device_free_bytes=device_free if type(device_free) is int else None,
        fragmented=largest < asked <= free_bytes,
        pins=_pins(replayed, state, owners),
    )


def _pins(replayed: Replay, state: DeviceState, owners: Sequence[Owner]) -> tuple[Pin, ...]:
    """Segments that blocks keep from being given back, those with the most free bytes first."""
    owner_at = {_address(replayed, owner.block): owner for owner in owners}
    pins = []
    for pieces in _segments(state):
        free_bytes = sum(size for address, size in pieces if address in state.space.starts)
        held = [owner_at[address] for address, _ in pieces if address in owner_at]
        if not free_bytes or not held:
            continue
        roles: dict[Role, int] = defaultdict(int)
        for owner in held:
            roles[owner.role] += owner.requested_bytes
        pins.append(Pin(segment_bytes=sum(size for _, size in pieces), free_bytes=free_bytes, roles=dict(roles)))
    return tuple(sorted(pins, key=lambda pin: -pin.free_bytes)[:_PINS])


def _segments(state: DeviceState) -> list[list[tuple[int, int]]]:
    """Address and size of all blocks, free ones too, segment by segment."""
    held = [(address, block.block_bytes) for address, block in state.blocks.items()]
    segments: list[list[tuple[int, int]]] = []
    end = -1
    for address, size in sorted([*held, *state.space.starts.items()]):
        if address != end or address in state.space.borders:
            segments.append([])
        segments[-1].append((address, size))
        end = address + size
    return segments


def _address(replayed: Replay, block: int) -> int:
    event = int(replayed.allocated_by[block])
    return int(replayed.trace[event]["addr"]) if event >= 0 else replayed.older_blocks[block].address
