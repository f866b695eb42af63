"""Count bytes as they come and go, role by role, and remember the highest moment."""

from collections.abc import Mapping
from dataclasses import dataclass

from ligerprof.roles import MemoryBreakdown, Role
from ligerprof.snapshots.rules import SizeRules


@dataclass(slots=True, eq=False)
class Block:
    """One allocation; it lives until its last holder lets go.

    Attributes:
        holders: Python variables, saved tensors and pending gradients that refer to it.
    """

    size_bytes: int
    role: Role
    holders: int = 1


_PLANES = (Role.LOGITS, Role.SHIFT_LOGITS, Role.CE_TEMPORARIES)


class Meter:
    """Allocated bytes by role, now and at the highest moment since `start`.

    Args:
        rules: how the allocator rounds what is asked for.

    Attributes:
        planes_peak_bytes: the most that tensors of tokens times vocabulary ever took together.
    """

    def __init__(self, rules: SizeRules) -> None:
        self._rules = rules
        self._held = dict.fromkeys(Role, 0)
        self._total_bytes = 0
        self._peak_total_bytes = 0
        self._peak = dict(self._held)
        self.planes_peak_bytes = 0
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
        """Forget the highest moment: the next one is looked for from here."""
        self._peak_total_bytes = self._total_bytes
        self._peak = dict(self._held)

    def peak(self) -> MemoryBreakdown:
        """Who held what at the highest moment since `start`."""
        return MemoryBreakdown(roles=self._peak)

    def take(self, size_bytes: int, role: Role) -> Block:
        """Allocate a block with one holder."""
        self._change(role, size_bytes, self._rules.round_request(size_bytes))
        return Block(size_bytes=size_bytes, role=role)

    def keep(self, block: Block) -> Block:
        """Add a holder."""
        block.holders += 1
        return block

    def drop(self, block: Block) -> None:
        """Take a holder away; the last one frees the block."""
        block.holders -= 1
        if block.holders == 0:
            self._change(block.role, -block.size_bytes, -self._rules.round_request(block.size_bytes))

    def touch(self, size_bytes: int, role: Role) -> None:
        """Allocate and free at once: what an operation needs while it runs."""
        if size_bytes:
            self.drop(self.take(size_bytes, role))

    def expect_library(self, size_bytes: int) -> None:
        """The next matrix product is the first of its thread: cuBLAS takes its workspace then."""
        self._library_bytes = size_bytes

    def multiply(self) -> None:
        """A matrix product runs."""
        if self._library_bytes:
            self.take(self._library_bytes, Role.LIBRARY_WORKSPACE)
            self._library_bytes = 0

    def add(self, roles: Mapping[Role, int], times: int = 1) -> None:
        """Add bytes whose rounding is counted already, such as what a decoder layer leaves behind."""
        for role, size_bytes in roles.items():
            self._held[role] += times * size_bytes
        self._total_bytes = sum(self._held.values())
        self._look()

    def _change(self, role: Role, size_bytes: int, block_bytes: int) -> None:
        self._held[role] += size_bytes
        self._held[Role.ALLOCATOR_ROUNDING] += block_bytes - size_bytes
        self._total_bytes += block_bytes
        self._look()

    def _look(self) -> None:
        if self._total_bytes > self._peak_total_bytes:
            self._peak_total_bytes = self._total_bytes
            self._peak = dict(self._held)
        self.planes_peak_bytes = max(self.planes_peak_bytes, sum(self._held[role] for role in _PLANES))
