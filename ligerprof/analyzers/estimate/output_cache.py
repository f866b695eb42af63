"""The cache of selective activation checkpointing: outputs of a layer's first pass that its recomputation takes."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ligerprof.analyzers.estimate.meter import Allocation, Meter
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.torch_memory.saved_tensors import SavePolicy, Selection


@dataclass(slots=True, eq=False)
class OutputCache:
    """Kept outputs in the order of the operations, each with the other results of its operation.

    Args:
        policy: what is kept.

    Attributes:
        selection: the state of the current pass.
    """

    policy: SavePolicy
    selection: Selection = field(init=False)
    _kept: deque[tuple[Allocation, Sequence[Allocation]]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.start_pass()

    def start_pass(self) -> None:
        """Count calls anew: the first pass begins, or the recomputation."""
        self.selection = Selection(self.policy)

    def keeps(self, operation: Operation) -> bool:
        """Whether the output of the next operation is kept."""
        return operation.always_kept or self.selection.keeps(operation.operator, operation.factor)

    def put(self, meter: Meter, output: Allocation, extra: Sequence[Allocation]) -> None:
        """Keep an output and the other results, in addition to their holders."""
        self._kept.append((meter.keep(output), [meter.keep(block) for block in extra]))

    def take(self) -> tuple[Allocation, Sequence[Allocation]]:
        """Hand over the next output and the other results."""
        return self._kept.popleft()

    def clear(self, meter: Meter) -> None:
        """Drop what the recomputation did not reach."""
        for output, extra in self._kept:
            for block in (output, *extra):
                meter.drop(block)
        self._kept.clear()
