"""A tape with parts that are checkpointed on their own, besides decoder layers."""

from collections.abc import Callable, Mapping

from ligerprof.analyzers.estimate.graph import Node
from ligerprof.analyzers.estimate.meter import Allocation, Meter
from ligerprof.analyzers.estimate.offloading import Offloading
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.tape import Tape
from ligerprof.analyzers.estimate.tensors import Pending, Tensor, Value


class TapeWithParts(Tape):
    """A tape whose parts save their input alone, and run again in backward (non-reentrant checkpointing)."""

    def __init__(self, meter: Meter, *, offloading: Offloading | None = None) -> None:
        super().__init__(meter, offloading=offloading)
        self._parts: dict[int, Callable[[Allocation], Allocation | None]] = {}

    def checkpointed(self, source: Value, run: Callable[[Tape], Value]) -> Value:
        """Run a part on `source`; it gets a tape for the first pass, and another for the one in backward."""
        first = Tape(self.meter, saving=False)
        first.hooks = self.hooks
        output = run(first)
        assert output.block is not None
        self.name(output)
        first.release(output)

        def backward(gradient: Allocation) -> Allocation | None:
            first.start_backward(output, gradient)
            again = Tape(self.meter, stop_after_saves=first.saves_seen)
            again.hooks = self.hooks
            run(again)
            again.take_over(first)
            return again.finish_backward(source)

        node = Node(
            Operation(elements=output.elements, width=output.width, inputs=(source,), saves=(source,)), (output,)
        )
        self._save(node)
        self._nodes.append(node)
        self._parts[id(node)] = backward
        return output

    def _compute_gradients(
        self, node: Node, incoming: list[Pending], loaded: Mapping[int, Allocation]
    ) -> list[tuple[Tensor, Pending]]:
        backward = self._parts.get(id(node))
        if backward is None:
            return super()._compute_gradients(node, incoming, loaded)
        block = backward(self.meter.keep(incoming[0].block))
        source = node.operation.inputs[0]
        return [] if block is None else [(source, Pending(block, is_view=False))]
