"""What a part of a training step allocates and frees, apart from the addresses that it happened at."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ligerprof.torch_memory.allocator.states import Operations, Sizes, place_left


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Allocations and frees in order.

    Attributes:
        operations: as in `RunAllocator.run`.
        sizes: requested bytes of each allocation.
    """

    operations: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def program(self) -> "Program":
        """The program of one shape."""
        sizes = np.array(self.sizes, np.int64)[:, None]
        return Program(operations=np.array(self.operations, np.int32), rows=np.arange(len(self.sizes)), sizes=sizes)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Program:
    """The traces of several shapes with one order of operations.

    Attributes:
        rows: for each allocation, its row of `sizes`.
        sizes: requested bytes, one column per shape.
    """

    operations: Operations
    rows: Sizes
    sizes: Sizes


class Ledger:
    """The blocks that are held between traces, in the order of `RunAllocator.run`."""

    def __init__(self) -> None:
        self._held: list[int] = []

    @property
    def count(self) -> int:
        """Blocks that are held now."""
        return len(self._held)

    def trace(self, events: Sequence[tuple[int, int]]) -> Trace:
        """Turn (address, requested bytes) events, where 0 bytes are a free, into a trace; moves the ledger on."""
        before = {address: -index for index, address in enumerate(self._held, 1)}
        own: dict[int, int] = {}
        sizes: list[int] = []
        operations: list[int] = []
        allocated: list[int] = []
        for address, size in events:
            if size:
                sizes.append(size)
                own[address] = len(sizes)
                allocated.append(address)
                operations.append(0)
            else:
                # an address can be used again, so the youngest block there is the one that ends
                operations.append(own.pop(address) if address in own else before.pop(address))
        left = set(own.values())
        self._held = place_left(
            [address if address in before else None for address in self._held],
            [address if number in left else None for number, address in enumerate(allocated, 1)],
        )
        return Trace(operations=tuple(_in_order(operations)), sizes=tuple(sizes))


def _in_order(operations: Sequence[int]) -> list[int]:
    """Sort frees that follow each other: their order changes nothing, and some have the order of addresses."""
    ordered: list[int] = []
    frees: list[int] = []
    for operation in operations:
        if operation:
            frees.append(operation)
            continue
        ordered += sorted(frees)
        frees.clear()
        ordered.append(0)
    return [*ordered, *sorted(frees)]
