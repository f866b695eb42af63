"""Count allocated bytes by role and by part of the model, and record the peak."""

from collections.abc import Mapping
from dataclasses import dataclass

from ligerprof.analyzers.estimate.places import WHOLE
from ligerprof.roles import MemoryBreakdown, Role
from ligerprof.torch_memory.allocator.sizes import SMALL_REQUEST_BYTES, SizeRules


@dataclass(slots=True, eq=False)
class Allocation:
    """One allocation, which is freed with its last holder.

    Attributes:
        place: the part of the model that allocated it.
        holders: Python variables, saved tensors and pending gradients that refer to it.
    """

    size_bytes: int
    role: Role
    place: str
    holders: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class UnsplitRemainders:
    """Blocks in which the allocator may leave a remainder of up to 1 MiB unsplit.

    Attributes:
        blocks: the number of blocks.
        counted_bytes: remainders included in the count, as on an empty device; cached blocks may fit more tightly.
    """

    blocks: int
    counted_bytes: int


_LOGITS_ROLES = (Role.LOGITS, Role.SHIFT_LOGITS, Role.CE_TEMPORARIES)


class Meter:
    """Allocated bytes by role, now and at the peak since `start`.

    Args:
        rules: the allocator's rounding of requests.

    Attributes:
        place: the current part of the model.
        large_blocks: live blocks of the pool in which remainders of up to 1 MiB stay unsplit.
        logits_peak_bytes: the highest sum of all [T, V] tensors so far.
    """

    def __init__(self, rules: SizeRules) -> None:
        self._rules = rules
        self._held = dict.fromkeys(Role, 0)
        self._placed: dict[tuple[str, Role], int] = {}
        self._total_bytes = 0
        self._peak_total_bytes = 0
        self._peak = dict(self._held)
        self._peak_placed = dict(self._placed)
        self.place = WHOLE
        self.large_blocks = self._peak_large_blocks = 0
        self._counted_remainder_bytes = self._peak_counted_remainder_bytes = 0
        self.logits_peak_bytes = 0
        self._library_bytes = 0

    @property
    def total_bytes(self) -> int:
        """Bytes allocated now."""
        return self._total_bytes

    @property
    def held(self) -> dict[Role, int]:
        """Bytes allocated now, by role."""
        return dict(self._held)

    def start(self) -> None:
        """Start a new peak from the current bytes."""
        self._peak_total_bytes = self._total_bytes
        self._peak = dict(self._held)
        self._peak_placed = dict(self._placed)
        self._peak_large_blocks = self.large_blocks
        self._peak_counted_remainder_bytes = self._counted_remainder_bytes

    def peak(self) -> MemoryBreakdown:
        """The peak since `start`, by role."""
        return MemoryBreakdown(roles=self._peak)

    def peak_places(self) -> dict[str, MemoryBreakdown]:
        """The peak by part of the model."""
        roles: dict[str, dict[Role, int]] = {}
        for (place, role), size_bytes in self._peak_placed.items():
            roles.setdefault(place, {})[role] = size_bytes
        return {place: MemoryBreakdown(roles=held) for place, held in roles.items()}

    def peak_remainders(self) -> UnsplitRemainders:
        """Unsplit remainders at the peak."""
        return UnsplitRemainders(blocks=self._peak_large_blocks, counted_bytes=self._peak_counted_remainder_bytes)

    def add_remainders(self, remainders: UnsplitRemainders) -> None:
        """Count the unsplit remainders of the blocks that the next `add` allocates."""
        self.large_blocks += remainders.blocks
        self._counted_remainder_bytes += remainders.counted_bytes

    def take(self, size_bytes: int, role: Role) -> Allocation:
        """Allocate a block with one holder."""
        block = Allocation(size_bytes=size_bytes, role=role, place=self.place)
        self.large_blocks += size_bytes > SMALL_REQUEST_BYTES
        self._change(block, size_bytes, self._rules.round_request(size_bytes))
        return block

    def keep(self, block: Allocation) -> Allocation:
        """Add a holder."""
        block.holders += 1
        return block

    def drop(self, block: Allocation) -> None:
        """Remove a holder; the last one frees the block."""
        block.holders -= 1
        if block.holders == 0:
            self.large_blocks -= block.size_bytes > SMALL_REQUEST_BYTES
            self._change(block, -block.size_bytes, -self._rules.round_request(block.size_bytes))

    def touch(self, size_bytes: int, role: Role) -> None:
        """Allocate and free a temporary."""
        if size_bytes:
            self.drop(self.take(size_bytes, role))

    def expect_library(self, size_bytes: int) -> None:
        """Allocate cuBLAS's workspace at the next matrix product, the first of its thread."""
        self._library_bytes = size_bytes

    def multiply(self) -> None:
        """Run a matrix product."""
        if self._library_bytes:
            self.take(self._library_bytes, Role.LIBRARY_WORKSPACE)
            self._library_bytes = 0

    def add(self, roles: Mapping[Role, int], times: int = 1, place: str | None = None) -> None:
        """Add bytes whose rounding is already counted, such as those that a decoder layer leaves behind."""
        for role, size_bytes in roles.items():
            self._count(place or self.place, role, times * size_bytes)
        self._look()

    def settle(self, role: Role, size_bytes: int) -> None:
        """Set a role to these bytes, attributed to the whole model."""
        for place, other in list(self._placed):
            if other is role:
                self._count(place, role, -self._placed[place, role])
        self.add({role: size_bytes}, place=WHOLE)

    def _count(self, place: str, role: Role, size_bytes: int) -> None:
        self._held[role] += size_bytes
        self._placed[place, role] = self._placed.get((place, role), 0) + size_bytes
        self._total_bytes += size_bytes

    def _change(self, block: Allocation, size_bytes: int, block_bytes: int) -> None:
        self._count(block.place, block.role, size_bytes)
        if block_bytes != size_bytes:
            self._count(block.place, Role.ALLOCATOR_ROUNDING, block_bytes - size_bytes)
        self._look()

    def _look(self) -> None:
        if self._total_bytes > self._peak_total_bytes:
            self._peak_total_bytes = self._total_bytes
            self._peak = dict(self._held)
            self._peak_placed = dict(self._placed)
            self._peak_large_blocks = self.large_blocks
            self._peak_counted_remainder_bytes = self._counted_remainder_bytes
        self.logits_peak_bytes = max(self.logits_peak_bytes, sum(self._held[role] for role in _LOGITS_ROLES))
