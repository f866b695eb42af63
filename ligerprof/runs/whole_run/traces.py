"""What a part of a training step allocates and frees, apart from the addresses that it happened at."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Allocations and frees in order.

    Attributes:
        operations: 0 allocates the next of `sizes`; n frees the n-th block of this trace, -n the n-th block that was
            held before.
        sizes: requested bytes of each allocation.
    """

    operations: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Program:
    """The traces of several shapes with one order of operations.

    Attributes:
        rows: for each allocation, its row of `sizes`.
        sizes: requested bytes, one column per shape.
    """

    operations: tuple[int, ...]
    rows: Numbers
    sizes: Numbers

    @classmethod
    def of(cls, trace: Trace) -> "Program":
        """The program of one shape."""
        rows = np.arange(len(trace.sizes))
        return cls(operations=trace.operations, rows=rows, sizes=np.array(trace.sizes, np.int64)[:, None])

    def trace(self, column: int) -> Trace:
        """The trace at one of the shapes."""
        return Trace(operations=self.operations, sizes=tuple(self.sizes[self.rows, column].tolist()))


class Ledger:
    """The blocks that are held between traces, in the order of `AllocatorState.run`."""

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
        self._held = [address for address in self._held if address in before] + [
            address for number, address in enumerate(allocated, 1) if number in left
        ]
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
