"""How CUDA's caching allocator sizes blocks: rounding of requests, and when it splits a free block."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ligerprof.text import whole_number

MIN_BLOCK_BYTES = 512
# requests up to here come from the small pool
SMALL_REQUEST_BYTES = 2**20
_FIRST_ROUNDUP_BYTES = 2**20
# no free block is as large
_NEVER_SPLIT = 2**64


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeRules:
    """The rules of c10/cuda/CUDACachingAllocator.cpp (round_size, should_split) under one configuration.

    Attributes:
        expandable_segments: rests of 512 bytes and more are split off in both pools.
        max_split_bytes: requests from this size on are not split from a larger block; None for no limit.
        roundup_divisions: divisions between powers of two, for requests from 1 MiB on; the
            last one holds for all larger ones; 0 or 1 leaves rounding to 512 bytes.
    """

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    roundup_divisions: Sequence[int] = ()

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> "SizeRules":
        """Read a snapshot's `allocator_settings`; what it lacks takes the allocator's defaults."""
        max_split = settings.get("max_split_size")
        divisions = settings.get("roundup_power2_divisions")
        return cls(
            expandable_segments=settings.get("expandable_segments") is True,
            max_split_bytes=max_split if type(max_split) is int and max_split > 0 else None,
            roundup_divisions=_divisions(divisions) if isinstance(divisions, Mapping) else (),
        )

    def round_request(self, requested_bytes: int) -> int:
        """Bytes of the smallest block that serves a request."""
        if requested_bytes < MIN_BLOCK_BYTES:
            return MIN_BLOCK_BYTES
        divisions = self._divisions_for(requested_bytes)
        if divisions > 1 and requested_bytes > MIN_BLOCK_BYTES * divisions:
            return _round_between_powers(requested_bytes, divisions)
        return -(-requested_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES

    def splits_off(self, block_bytes: int, rest_bytes: int) -> bool:
        """Whether a block of `block_bytes` leaves the rest of the free block it was found in to others."""
        return rest_bytes >= self.smallest_rest(block_bytes)

    def smallest_rest(self, block_bytes: int) -> int:
        """The fewest bytes that a block of `block_bytes` leaves to others of the free block it was found in."""
        if self.expandable_segments or block_bytes <= SMALL_REQUEST_BYTES:
            return MIN_BLOCK_BYTES
        if self.max_split_bytes is not None and block_bytes >= self.max_split_bytes:
            return _NEVER_SPLIT
        return SMALL_REQUEST_BYTES + 1

    def _divisions_for(self, requested_bytes: int) -> int:
        if not self.roundup_divisions:
            return 0
        power = max(0, requested_bytes.bit_length() - _FIRST_ROUNDUP_BYTES.bit_length())
        return self.roundup_divisions[min(power, len(self.roundup_divisions) - 1)]


def _divisions(by_mebibytes: Mapping[Any, Any]) -> Sequence[int]:
    """Divisions in rising order of the mebibytes that key them; none where all are off."""
    sizes = ((whole_number(key) if isinstance(key, str) else key, value) for key, value in by_mebibytes.items())
    known = {size: value for size, value in sizes if type(size) is int and type(value) is int}
    ordered = tuple(known[key] for key in sorted(known))
    return ordered if any(value > 1 for value in ordered) else ()


def _round_between_powers(requested_bytes: int, divisions: int) -> int:
    """Round up to the next of `divisions` steps between two powers of two."""
    floor = 1 << (requested_bytes.bit_length() - 1)
    if floor == requested_bytes:
        return requested_bytes
    step = floor >> (divisions.bit_length() - 1)
    if step == 0:
        return floor << 1
    return -(-requested_bytes // step) * step
