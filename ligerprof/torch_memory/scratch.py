"""Blocks that an operator allocates and frees while it runs, as sizes in the order of its CUDA code."""

from collections.abc import Sequence

# bytes: above zero a block is allocated, below zero the oldest block of that size is freed
Scratch = tuple[int, ...]


def together(*sizes_bytes: int) -> Scratch:
    """Blocks held together and freed in reverse order, as C++ destroys locals; sizes of 0 are skipped."""
    sizes = [size for size in sizes_bytes if size]
    return (*sizes, *(-size for size in reversed(sizes)))


def highest_bytes(scratch: Sequence[int]) -> int:
    """The most bytes that are allocated at once."""
    held_bytes = most_bytes = 0
    for size in scratch:
        held_bytes += size
        most_bytes = max(most_bytes, held_bytes)
    return most_bytes
