"""Activation offloading: what autograd saves is in main memory between the passes, and which tensors stay on the GPU.

Restates what `ligerprof/runs/activation_offload.py` does to references; that module cites TRL.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ligerprof.analyzers.estimate.meter import Allocation, Meter
from ligerprof.torch_memory.saved_tensors import SMALLEST_BYTES, STASH_LENGTH, pinned_bytes


@dataclass(frozen=True, slots=True, eq=False)
class PackedTensor:
    """A saved tensor.

    Attributes:
        number: its place among all saved tensors of the micro-batch.
        block: its memory on the GPU; held here if `stays`, else only by its other holders.
        stays: whether it is on the GPU until its node needs it.
    """

    number: int
    block: Allocation
    stays: bool


class Offloading:
    """The saved tensors of one micro-batch.

    Args:
        meter: counts the memory on the GPU.

    Attributes:
        host_bytes: page-locked memory of all copies.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._number = 0
        self._originals: dict[int, Allocation] = {}
        self._loaded: dict[int, Allocation] = {}
        self._hooks: list[Callable[[], None]] = []
        self.host_bytes = 0

    def skip(self, tensors: int) -> None:
        """Tensors are saved that are on the GPU anyway, such as parameters."""
        self._number += tensors

    def pack(self, block: Allocation) -> PackedTensor:
        """Save a tensor, without a holder of its own unless it stays on the GPU."""
        self._number += 1
        if block.size_bytes < SMALLEST_BYTES or any(block is original for original in self._originals.values()):
            return PackedTensor(self._number, self._meter.keep(block), stays=True)
        for number in [number for number in self._originals if number <= self._number - STASH_LENGTH]:
            self._meter.drop(self._originals.pop(number))
        self._originals[self._number] = self._meter.keep(block)
        self.host_bytes += pinned_bytes(block.size_bytes)
        self._meter.offloaded(block.size_bytes, to_host=True)
        return PackedTensor(self._number, block, stays=False)

    def unpack(self, packed: PackedTensor, *, starts_node: bool) -> Allocation:
        """Give a saved tensor to its node, which drops it.

        Args:
            starts_node: whether it is the first one that its node unpacks.
        """
        if packed.stays:
            return packed.block
        earlier = list(self._loaded) if starts_node else []
        original = self._originals.get(packed.number)
        if original is None:
            self._loaded[packed.number] = self._meter.take(packed.block.size_bytes, packed.block.role)
            self._meter.offloaded(packed.block.size_bytes, to_host=False)
        self._hooks.append(lambda: self._after(packed.number, earlier))
        return self._meter.keep(self._loaded[packed.number] if original is None else original)

    def end_node(self) -> None:
        """A node has run: its hooks release originals, and what earlier nodes had loaded."""
        for hook in self._hooks:
            hook()
        self._hooks.clear()

    def clear(self) -> None:
        """The backward pass has ended."""
        for block in (*self._originals.values(), *self._loaded.values()):
            self._meter.drop(block)
        self._originals.clear()
        self._loaded.clear()

    def _after(self, number: int, earlier: list[int]) -> None:
        loaded = self._loaded.get(number)
        # something that a recomputation saved is the same memory
        if loaded is not None and loaded.holders > 1:
            earlier = [*earlier, number]
        for block in self._originals.values():
            self._meter.drop(block)
        self._originals.clear()
        for older in earlier:
            if older in self._loaded:
                self._meter.drop(self._loaded.pop(older))
