"""Replay a recording with some blocks removed, resized, or alive at other times: the peak after a change."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ligerprof.analyzers.attribution.blocks import Attribution
from ligerprof.analyzers.attribution.stacks import StackReader
from ligerprof.roles import ROLE_CODES, ROLES, Role
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.trace import Int64s, is_among
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


# indices of moments, or all moments
Window = Int64s | slice

_UNKNOWN = -1
# smaller blocks need no role: a hundred thousand of them would be needed to matter
_SMALL_SHARE = 100_000
_MOST_ROUNDS = 40


class Edit:
    """Changes to the allocated bytes of a recording.

    Attributes:
        request_divisor: the change divides the failed request by this number; 0 if it avoids the request.
    """

    def __init__(self, replayed: Replay) -> None:
        self._replayed = replayed
        self._changes = np.zeros(replayed.last_moment + 2, dtype=np.int64)
        self._spikes: list[tuple[Int64s, Int64s]] = []
        self._sizes = replayed.block_bytes
        self.request_divisor = 1

    def hold(self, size_bytes: Int64s | int, starts: Int64s, stops: Int64s) -> None:
        """Add blocks that live from each start up to the moment before each stop."""
        sizes = np.where(stops > starts, size_bytes, 0)
        np.add.at(self._changes, starts, sizes)
        np.add.at(self._changes, stops, -sizes)

    def release(self, size_bytes: Int64s | int, starts: Int64s, stops: Int64s) -> None:
        """Take blocks away from each start up to the moment before each stop."""
        sizes = np.asarray(size_bytes, dtype=np.int64)
        self.hold(-sizes, starts, stops)

    def remove(self, blocks: Int64s) -> None:
        """Take blocks away for their whole lives."""
        self.release(self._replayed.block_bytes[blocks], self.starts(blocks), self.stops(blocks))

    def resize(self, blocks: Int64s, divisor: int) -> None:
        """Divide the size of blocks."""
        self.set_size(blocks, self._replayed.block_bytes[blocks] // divisor)

    def set_size(self, blocks: Int64s, sizes: Int64s) -> None:
        """Give blocks other sizes."""
        self.release(self._replayed.block_bytes[blocks] - sizes, self.starts(blocks), self.stops(blocks))
        self._sizes = self._sizes.copy()
        self._sizes[blocks] = sizes

    def sizes(self, blocks: Int64s) -> Int64s:
        """The sizes of blocks, as far as they have been given others."""
        return self._sizes[blocks]

    def end(self, blocks: Int64s, stops: Int64s) -> None:
        """End blocks at the given moments, if they live longer."""
        ends = self.stops(blocks)
        self.release(self._replayed.block_bytes[blocks], np.minimum(stops, ends), ends)

    def add(self, other: "Edit") -> None:
        """Add another edit of the same recording."""
        self._changes += other._changes
        self._spikes += other._spikes

    def shift(self, size_bytes: Int64s) -> None:
        """Add bytes at each moment."""
        self._changes[: len(size_bytes)] += np.diff(size_bytes, prepend=0)

    def spike(self, moments: Int64s, size_bytes: Int64s) -> None:
        """Add bytes at single moments, such as the temporary tensors of a kernel."""
        self._spikes.append((moments, size_bytes))

    def starts(self, blocks: Int64s) -> Int64s:
        """The first moment of each block."""
        return starts(self._replayed, blocks)

    def stops(self, blocks: Int64s) -> Int64s:
        """The moment after the last one of each block."""
        return stops(self._replayed, blocks)

    def allocated_bytes(self, request: Request | None) -> Int64s:
        """Allocated bytes at each moment after the change, with spikes and the allocation that failed."""
        allocated = np.cumsum(self._changes[:-1])
        allocated += self._replayed.allocated_bytes
        highest = allocated.copy() if self._spikes else allocated
        for at, size_bytes in self._spikes:
            np.maximum.at(highest, at, allocated[at] + size_bytes)
        if request is not None and self.request_divisor:
            requested = allocated[request.moment] + request.size_bytes // self.request_divisor
            highest[request.moment] = max(highest[request.moment], requested)
        return highest

    def highest(self, window: Window, request: Request | None) -> tuple[int, int]:
        """The peak after the change, and its moment."""
        allocated = self.allocated_bytes(request)
        place = int(np.argmax(allocated[window]))
        moment = range(len(allocated))[window][place] if isinstance(window, slice) else int(window[place])
        return int(allocated[moment]), moment


def starts(replayed: Replay, blocks: Int64s) -> Int64s:
    """The first moment of each block."""
    return replayed.allocated_by[blocks] + 1


def stops(replayed: Replay, blocks: Int64s) -> Int64s:
    """The moment after the last one of each block."""
    freed = replayed.freed_by[blocks]
    return np.where(freed < 0, replayed.last_moment, freed) + 1


class RoleBook:
    """The roles of blocks at any moment, as far as changes need them.

    A block has the role that attribution gives it if it was live at a moment that was looked at. Any other block has
    the role of a block with the same call site and size.

    Attributes:
        least_bytes: smaller blocks need no role.
    """

    def __init__(self, attribution: Attribution, peak_moment: int) -> None:
        self._attribution, self._peak_moment = attribution, peak_moment
        self._replayed = attribution.replayed
        self._alike = attribution.call_sites.size_at_place
        self._codes = np.full(len(self._alike), _UNKNOWN, dtype=np.int8)
        self._codes_of_alike = np.full(int(self._alike.max(initial=-1)) + 1, _UNKNOWN, dtype=np.int8)
        self._all_codes: npt.NDArray[np.int8] | None = None
        self._found: dict[tuple[Role, ...], Int64s] = {}
        self.least_bytes = int(self._replayed.allocated_bytes[peak_moment]) // _SMALL_SHARE
        self._looked_at: set[int] = set()
        self.learn(peak_moment)

    def learn(self, moment: int) -> bool:
        """Find the roles of the blocks that are live at a moment; False if they are known already."""
        if moment in self._looked_at:
            return False
        self._looked_at.add(moment)
        live = self._replayed.live_at(moment)
        unknown = live[(self._codes[live] == _UNKNOWN) & (self._replayed.block_bytes[live] >= self.least_bytes)]
        found = self._attribution.role_codes_of(unknown, self._peak_moment).astype(np.int8)
        self._codes[unknown] = found
        alike = self._alike[unknown]
        first = self._codes_of_alike[alike] == _UNKNOWN
        self._codes_of_alike[alike[first]] = found[first]
        self._all_codes = None
        return True

    def blocks(self, *roles: Role) -> Int64s:
        """The blocks that have one of the roles."""
        codes = self._known_codes()
        if roles not in self._found:
            self._found[roles] = np.flatnonzero(_is_one_of(roles)[codes]).astype(np.int64)
        return self._found[roles]

    def live(self, moment: int, *roles: Role) -> Int64s:
        """The blocks with one of the roles that are live at a moment."""
        live = self._replayed.live_at(moment)
        return live[_is_one_of(roles)[self._known_codes()[live]]]

    def bytes_at(self, moment: int, *roles: Role) -> int:
        """Bytes of these roles at a moment."""
        return int(self._replayed.block_bytes[self.live(moment, *roles)].sum())

    def _known_codes(self) -> npt.NDArray[np.int8]:
        if self._all_codes is None:
            self._all_codes = np.where(self._codes == _UNKNOWN, self._codes_of_alike[self._alike], self._codes)
            self._found.clear()
        return self._all_codes


def _is_one_of(roles: Sequence[Role]) -> npt.NDArray[np.bool_]:
    """Whether each code is that of one of the roles; the last one is of unknown roles."""
    chosen = np.zeros(len(ROLES) + 1, dtype=bool)
    chosen[[ROLE_CODES[role] for role in roles]] = True
    return chosen


def peak_after(
    change: Callable[[], Edit | None], book: RoleBook, window: Window, request: Request | None
) -> tuple[int, int] | None:
    """The peak after a change and its moment, None if the change has no effect that can be computed.

    The new peak may be at a moment where the roles of blocks are not known yet, so the change is made again until
    they are.
    """
    for _ in range(_MOST_ROUNDS):
        edit = change()
        if edit is None:
            return None
        peak_bytes, moment = edit.highest(window, request)
        if not book.learn(moment):
            return peak_bytes, moment
    return None
