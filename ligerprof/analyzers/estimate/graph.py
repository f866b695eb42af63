"""The graph that a tape builds: a node per operation that backward runs."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ligerprof.analyzers.estimate.meter import Allocation
from ligerprof.analyzers.estimate.offloading import PackedTensor
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.tensors import Tensor, Value


@dataclass(slots=True, eq=False)
class Node:
    """An operation that backward runs."""

    operation: Operation
    outputs: tuple[Value, ...]
    saved: list[Allocation] = field(default_factory=list)
    packed: list[PackedTensor] = field(default_factory=list)
    packed_early: list[tuple[Tensor, PackedTensor]] = field(default_factory=list)
    early: list[tuple[Tensor, Allocation]] = field(default_factory=list)


def nodes_only_for(nodes: Sequence[Node], output: Value) -> Iterator[Node]:
    """The nodes that lead to this tensor, which no operation reads, and to no other; the last one first."""
    readers = Counter(id(item) for node in nodes for item in node.operation.differentiable)
    unread = {id(output)}
    for node in reversed(list(nodes)):
        if unread.issuperset(map(id, node.outputs)):
            readers.subtract(map(id, node.operation.differentiable))
            unread.update(id(item) for item in node.operation.differentiable if not readers[id(item)])
            yield node
