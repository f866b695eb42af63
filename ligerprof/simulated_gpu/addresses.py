"""Where CUDA's driver places the allocator's segments, which decides between free blocks of one size.

As seen in 23 programs on an H200 (CUDA 13): two gaps near the context are filled upwards, the larger one as soon as
kernels have run, since loading them moves what was there. Other segments go below all earlier ones, each at a multiple
of 32 MiB, or into what these leave.
"""

from ligerprof.units import MIB

_FIRST = 0x7F_8000_000000 - 2 * MIB
_STEP_BYTES = 32 * MIB
# distances from the first segment, in which the libraries' own memory lies, too
_UPPER_GAP = (_FIRST + 74 * MIB, _FIRST + 98 * MIB)
_LOWER_GAP = (_FIRST - 340 * MIB, _FIRST)
_LOWEST = _FIRST - 414 * MIB
_SMALL_BYTES = 2 * MIB


class Gap:
    """Free addresses, taken from the lowest on."""

    def __init__(self, begin: int, end: int) -> None:
        self._next, self._end = begin, end

    def place(self, size_bytes: int) -> int | None:
        """The address of a segment, None if it is too large."""
        if self._next + size_bytes > self._end:
            return None
        self._next += size_bytes
        return self._next - size_bytes


class Addresses:
    """The addresses of new segments.

    Attributes:
        kernels_ran: whether the program has computed anything on the GPU.
    """

    def __init__(self) -> None:
        self.kernels_ran = False
        self._first = Gap(_FIRST, _FIRST + _SMALL_BYTES)
        self._upper, self._lower = Gap(*_UPPER_GAP), Gap(*_LOWER_GAP)
        self._rests: list[Gap] = []
        self._lowest = _LOWEST

    def place(self, size_bytes: int) -> int:
        """The address of a new segment."""
        first = [self._first] if size_bytes == _SMALL_BYTES else []
        gaps = [*first, *reversed(self._rests), self._lower if self.kernels_ran else self._upper]
        found = (gap.place(size_bytes) for gap in gaps)
        address = next((address for address in found if address is not None), None)
        if address is None:
            end = self._lowest
            address = self._lowest = (end - size_bytes) // _STEP_BYTES * _STEP_BYTES
            self._rests.append(Gap(address + size_bytes, end))
        return address
