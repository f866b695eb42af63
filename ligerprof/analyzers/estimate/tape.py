"""A tape of tensor operations, from which the memory of forward and backward is counted."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from ligerprof.analyzers.estimate.graph import Node, nodes_only_for
from ligerprof.analyzers.estimate.hooks import Hooks
from ligerprof.analyzers.estimate.meter import Allocation, Meter, Stream
from ligerprof.analyzers.estimate.offloading import Offloading
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.output_cache import OutputCache
from ligerprof.analyzers.estimate.tensors import Pending, Tensor, Value, Weight
from ligerprof.roles import Role
from ligerprof.torch_memory.dtypes import Scratch
from ligerprof.torch_memory.saved_tensors import ADDMM, MM


def _do_nothing() -> None:
    pass


class Tape:
    """Run operations forward on a meter, then backward in reverse order, as autograd's engine does.

    Args:
        meter: counts the bytes.
        saving: False for the first pass of a checkpointed region, which saves nothing for backward.
        pinning: False for the first pass of reentrant checkpointing, which makes no graph.
        stop_after_saves: stop a recomputation after this many operations have saved
            (torch.utils.checkpoint's early stop); None runs to the end.
        cache: outputs that a first pass keeps and its recomputation takes, with selective checkpointing.
        offloading: moves what is saved to main memory, or None.

    Attributes:
        hooks: what the engine does around operations and with complete gradients.
        on_gpu: whether the operations that run now keep what they save on the GPU in spite of `offloading`.
        role: the role of all that the operations make that run now, in place of their own; None for their own.
    """

    def __init__(
        self,
        meter: Meter,
        *,
        saving: bool = True,
        pinning: bool = True,
        stop_after_saves: int | None = None,
        cache: OutputCache | None = None,
        offloading: Offloading | None = None,
    ) -> None:
        self.meter = meter
        self.saves_seen = 0
        self.saving = saving
        self._pinning = pinning
        self._pinned: list[Allocation] = []
        self._stop_after_saves = stop_after_saves
        self._cache = cache
        self._offloading = offloading
        self.on_gpu = False
        self.role: Role | None = None
        self._stopped = False
        self._nodes: list[Node] = []
        self._variables: list[Allocation] = []
        self._pending: dict[int, Pending] = {}
        self._awaited: dict[int, Callable[[], None]] = {}
        self.hooks = Hooks()
        # called once no saved tensor is left
        self._after_saved: Callable[[], None] = _do_nothing

    def run(self, operation: Operation) -> Value:
        """Run one operation; the holder of its output is the Python variable that it is assigned to."""
        if self.role is not None:
            operation = replace(operation, role=self.role, gradient_role=self.role)
        needs_gradient = any(item.needs_gradient for item in operation.differentiable)
        output = Value(operation.elements, operation.width, needs_gradient, None, operation.gradient_role)
        node = Node(operation, (output,))
        saves_now = needs_gradient and operation.saves_anything and not self._stopped
        if not self._stopped:
            self.hooks.before_read(operation)
        if saves_now:
            self._save(node)
        # a C++ operation saves its inputs before it computes, so the last one does not compute
        if not self._stopped or (saves_now and operation.in_function):
            self._make_output(node)
            if needs_gradient and self._pinning:
                self._pin(operation.pins)
        if saves_now and self._stopped:
            self._unwind()
        if not self._stopped:
            self.hooks.after_read(operation)
        if needs_gradient:
            self._nodes.append(node)
            self._offload(node)
        return output

    def keeps_outputs_of(self, operator: str) -> bool:
        """Whether selective checkpointing keeps outputs of an operator."""
        return self._cache is not None and operator in self._cache.policy.every

    def release_pins(self) -> None:
        """The graph is freed, and with it what its Functions keep as attributes."""
        self._forget(self._pinned)
        self._pinned.clear()

    def _pin(self, values: Iterable[Value]) -> None:
        blocks = (value.block for value in values if value.needs_gradient)
        self._pinned.extend(self.meter.keep(block) for block in blocks if block is not None)

    def split(self, value: Value, parts: int | tuple[int, ...]) -> tuple[Value, ...]:
        """`value.split(...)`: views; one copy concatenates their gradients.

        Args:
            parts: the number of equal parts, or the elements of each part.
        """
        sizes = (value.elements // parts,) * parts if isinstance(parts, int) else parts
        outputs = tuple(Value(size, value.width, value.needs_gradient, value.block) for size in sizes)
        for output in outputs:
            self.name(output)
        if value.needs_gradient:
            operation = Operation(elements=value.elements, width=value.width, inputs=(value,))
            self._nodes.append(Node(operation, outputs))
        return outputs

    def turn(self, *values: Value, in_place: bool) -> tuple[Value, ...]:
        """One function that gives each tensor a successor and saves none of them; backward makes all gradients first.

        Args:
            in_place: whether the successors lie in the tensors' own memory.
        """
        # the outputs of a function need gradients if any input does, and it makes all gradients then
        operation = Operation(
            elements=sum(value.elements for value in values),
            width=values[0].width,
            inputs=values,
            backward_scratch_bytes=sum(value.size_bytes for value in values if not value.needs_gradient),
            in_function=True,
        )
        needed = any(value.needs_gradient for value in values)
        outputs = tuple(Value(value.elements, value.width, needed, value.block) for value in values)
        if not self._stopped:
            self.meter.ran(operation)
        for output in outputs:
            if not in_place and not self._stopped:
                output.block = self.meter.take(output.size_bytes, operation.role)
                self._variables.append(output.block)
            else:
                self.name(output)
        if needed:
            # the engine frees what arrived for the last output first
            self._nodes.append(Node(operation, outputs[::-1]))
        return outputs

    def slice(self, value: Value, elements: int) -> Value:
        """`value[..., a:b]`: a view, whose gradient is copied into zeros as large as `value`."""
        return self.run(Operation(elements=elements, width=value.width, inputs=(value,), view_of=value))

    def name(self, value: Value) -> Value:
        """Assign a tensor to one more Python variable."""
        if value.block is not None and not self._stopped:
            self._variables.append(self.meter.keep(value.block))
        return value

    def release(self, *values: Value) -> None:
        """The Python variables of these tensors go out of scope."""
        for value in values:
            if value.block is not None and value.block in self._variables:
                self._variables.remove(value.block)
                self.meter.drop(value.block)

    def discard(self, value: Value) -> None:
        """No operation will read this tensor: what leads to it alone is freed."""
        for node in nodes_only_for(self._nodes, value):
            self._nodes.remove(node)
            self._forget(node.saved)

    def hand_over(self, value: Value) -> Allocation:
        """Pass the tensor's reference to the caller, which drops the block."""
        assert value.block is not None
        self._variables.remove(value.block)
        return value.block

    def receive(self, block: Allocation) -> None:
        """Take a reference that was handed over for a variable of this tape."""
        self._variables.append(block)

    def backward(self, output: Value, gradient: Allocation, source: Value | None) -> Allocation | None:
        """Run backward from the gradient of `output`.

        Returns:
            The gradient of `source`, held once; None if it needs none.
        """
        self.start_backward(output, gradient)
        return self.finish_backward(source)

    def expect(self, output: Value, gradient: Allocation) -> None:
        """Run backward from the gradient of another output, too, which the caller holds."""
        self._pending[id(output)] = Pending(self.meter.keep(gradient), is_view=False)

    def start_backward(self, output: Value, gradient: Allocation) -> None:
        """Run backward up to the first operation that needs a saved tensor."""
        self._pending[id(output)] = Pending(gradient, is_view=False)
        while self._nodes and not self._nodes[-1].operation.saves_anything:
            self._run_backward(self._nodes.pop())
        if self._nodes and any(id(output) in self._pending for output in self._nodes[-1].outputs):
            self.hooks.before_gradient(self._nodes[-1].operation)

    def take_over(self, first_pass: "Tape") -> None:
        """Continue the backward of the pass that this tape recomputes."""
        del self._nodes[len(first_pass._nodes) :]
        again = {
            id(old): id(new)
            for ours, theirs in zip(self._nodes, first_pass._nodes, strict=True)
            for new, old in zip(ours.outputs, theirs.outputs, strict=True)
        }
        self._pending = {again.get(key, key): pending for key, pending in first_pass._pending.items()}

    def finish_backward(
        self,
        source: Value | None,
        *,
        after_first: Callable[[], None] | None = None,
        after_saved: Callable[[], None] = _do_nothing,
    ) -> Allocation | None:
        """Run the rest of backward; return the gradient of `source`, held once, or None if it needs none.

        Args:
            after_first: called when the first operation has run.
            after_saved: called when the last saved tensor is freed.
        """
        first_saver = next((at for at, node in enumerate(self._nodes) if node.operation.saves_anything), 0)
        self._after_saved = after_saved
        while self._nodes:
            self._run_backward(self._nodes.pop())
            if after_first is not None:
                after_first()
                after_first = None
            if self._cache is not None and len(self._nodes) == first_saver:
                self._cache.clear(self.meter)
        pending = self._pending.pop(id(source), None)
        return pending.block if pending is not None else None

    def on_gradient(self, value: Value, call: Callable[[], None]) -> None:
        """Call a hook on `value` when its gradient is there, before the operation that made it runs backward."""
        self._awaited[id(value)] = call

    def forget_gradients(self) -> None:
        """Drop unused gradients, such as that of a frozen embedding's output."""
        self._forget(pending.block for pending in self._pending.values())
        self._pending.clear()

    def _save(self, node: Node) -> None:
        self.saves_seen += 1
        if self.saving:
            blocks = (item.block for item in node.operation.saves if isinstance(item, Value))
            node.saved.extend(self.meter.keep(block) for block in blocks if block is not None)
            if self._stop_after_saves is not None:
                # what a recomputation saves is detached: it holds the memory that a trained weight had then
                weights = [item for item in node.operation.saves if isinstance(item, Weight) and item.trainable]
                gathered = [self.hooks.block_of(weight) for weight in weights]
                node.saved.extend(self.meter.keep(block) for block in gathered if block is not None)
        self._stopped = self.saves_seen == self._stop_after_saves

    def _make_output(self, node: Node) -> None:
        operation, output = node.operation, node.outputs[0]
        keeps = self.saving and output.needs_gradient
        is_cached = self._cache is not None and self._cache.keeps(operation)
        if self._cache is not None:
            self.meter.asked()
        if self._cache is not None and is_cached and self.saving:
            output.block, extra = self._cache.take()
            if operation.in_function:
                # the function runs, and only the operator inside takes its output from the cache
                leading = self.meter.run_scratch(operation.leading_scratch, operation.scratch_role or operation.role)
                self._compute(operation, operation.forward_scratch_bytes, leading, product=_product(operation))
        else:
            extra = self._compute_output(node)
        if self._cache is not None and is_cached and not self.saving and output.block is not None:
            self._cache.put(self.meter, output.block, extra)
        if output.block is not None:
            self._variables.append(output.block)
        node.saved += extra
        if operation.saves_output and output.block is not None:
            node.saved.append(self.meter.keep(output.block))
        if not keeps:
            self._forget(node.saved)
            node.saved.clear()

    def _offload(self, node: Node) -> None:
        """Pack what the operation has saved; the packed tensors have their own holders."""
        offloading = self._offloading
        if offloading is None or self.on_gpu:
            return
        weights = sum(isinstance(item, Weight) for item in node.operation.saves)
        offloading.skip(weights + node.operation.other_saves)
        node.packed = [offloading.pack(block) for block in node.saved]
        node.packed_early = [(item, offloading.pack(block)) for item, block in node.early]
        self._forget((*node.saved, *(block for _, block in node.early)))
        node.saved, node.early = [], []

    def _load(self, node: Node) -> dict[int, Allocation]:
        """Unpack what the operation has saved; the loaded blocks by those that were packed."""
        offloading = self._offloading
        if offloading is None:
            return {}
        starts = iter((True,))
        node.saved += [offloading.unpack(item, starts_node=next(starts, False)) for item in node.packed]
        node.early += [
            (item, offloading.unpack(packed, starts_node=next(starts, False))) for item, packed in node.packed_early
        ]
        return {id(old.block): new for old, new in zip(node.packed, node.saved, strict=False)}

    def _compute_output(self, node: Node) -> Sequence[Allocation]:
        """Allocate the output, unless it is a view, and early gradients; returns what else is saved for backward."""
        operation, output = node.operation, node.outputs[0]
        self.meter.ran(operation)
        leading = self.meter.run_scratch(operation.leading_scratch, operation.scratch_role or operation.role)
        extra = self._take_extra(operation) if operation.saves_first else []
        if operation.view_of is None:
            output.block = self.meter.take(output.size_bytes, operation.role)
        else:
            shown = operation.view_of
            # a gathered weight's memory is there for as long as views of it
            shared = shown.block if isinstance(shown, Value) else self.hooks.block_of(shown)
            output.block = None if shared is None else self.meter.keep(shared)
        if not operation.saves_first:
            extra = self._take_extra(operation)
        if self.saving and output.needs_gradient:
            wanted = [(item, size) for item, size in operation.early if item.needs_gradient]
            node.early.extend((item, self.meter.take(size, _gradient_role(item))) for item, size in wanted)
        self._compute(operation, operation.forward_scratch_bytes, leading, product=_product(operation))
        return extra

    def _take_extra(self, operation: Operation) -> list[Allocation]:
        return [self.meter.take(size_bytes, operation.role) for size_bytes in operation.extra_blocks]

    def _compute(
        self, operation: Operation, scratch: int | Scratch, leading: list[Allocation], *, product: str | None
    ) -> None:
        """Allocate and free the temporaries of an operation or of its gradient.

        Args:
            product: the operator of a product of matrices.
        """
        if product is not None:
            self.meter.multiply(adds_bias=product == ADDMM)
        # C++ frees temporaries in reverse order
        left = self.meter.run_scratch(scratch, operation.scratch_role or operation.role, leading)
        self._forget((*left[len(leading) :], *reversed(left[: len(leading)])))

    def _unwind(self) -> None:
        """Drop all variables: the exception that stops a recomputation ends its frames, the innermost first."""
        for block in reversed(self._variables):
            self.meter.drop(block)
        self._variables.clear()
        self.release_pins()

    def _run_backward(self, node: Node) -> None:
        arrived = [self._pending.pop(id(item), None) for item in (*node.operation.sums, *node.outputs)]
        incoming = [pending for pending in arrived if pending is not None]
        if incoming:
            for output in node.outputs:
                self._awaited.get(id(output), _do_nothing)()
        loaded = self._load(node)
        operation = node.operation
        if incoming:
            self.hooks.before_gradient(operation)
        delivered, unreduced = self._call_function(node, incoming, loaded) if incoming else ([], [])
        if self._stop_after_saves is not None:
            # checkpointing's hooks release recomputed tensors to the gradient function, whose local variables end in
            # reverse order
            self._forget(reversed(node.saved))
            node.saved.clear()
        if unreduced or operation.reduction_scratch_bytes:
            self._forget(
                self.meter.run_scratch(operation.reduction_scratch_bytes if incoming else 0, operation.role, unreduced)
            )
        self._forget(pending.block for pending in incoming)
        self._forget(node.saved)
        if self._after_saved is not _do_nothing and not any(other.operation.saves_anything for other in self._nodes):
            self._after_saved()
            self._after_saved = _do_nothing
        if self._offloading is not None:
            self._offloading.end_node()
        # the views' own nodes run in the reverse order of forward
        for item, pending in reversed(delivered) if node.operation.gradient_is_view else delivered:
            self._deliver(item, pending)
        if incoming:
            self.hooks.after_gradient(operation)

    def _call_function(
        self, node: Node, incoming: list[Pending], loaded: Mapping[int, Allocation]
    ) -> tuple[list[tuple[Tensor, Pending]], list[Allocation]]:
        """The gradients by their tensors, and what is left to be summed."""
        operation = node.operation
        sums = (operation.unreduced_bytes,) if operation.unreduced_bytes else ()
        first = self.meter.run_scratch(sums if operation.sums_first else (), operation.role)
        delivered = self._compute_gradients(node, incoming, loaded)
        return delivered, first or self.meter.run_scratch(() if operation.sums_first else sums, operation.role)

    def _compute_gradients(
        self, node: Node, incoming: list[Pending], loaded: Mapping[int, Allocation]
    ) -> list[tuple[Tensor, Pending]]:
        operation = node.operation
        self.meter.differentiated(operation)
        scratch_role = operation.scratch_role or operation.role
        leading = self.meter.run_scratch(operation.leading_gradient_scratch, scratch_role)
        # gradients that forward has computed need no product
        multiplies = operation.is_product and bool(operation.inputs or operation.reuses) and not operation.early
        made = []
        for item in operation.inputs:
            if item.needs_gradient:
                made.append((item, Pending(self._make_gradient(item), operation.gradient_is_view)))
                if multiplies:
                    self.meter.multiply()
        passed = [
            (item, Pending(self.meter.keep(incoming[0].block), incoming[0].is_view))
            for item in operation.passes
            if item.needs_gradient
        ]
        self._compute(operation, operation.backward_scratch_bytes, leading, product=MM if multiplies else None)
        reused = [
            (item, Pending(self.meter.keep(loaded.get(id(item.block), item.block)), is_view=False))
            for item in operation.reuses
            if item.needs_gradient and item.block is not None
        ]
        return made + passed + reused + self._take_early(node)

    def _take_early(self, node: Node) -> list[tuple[Tensor, Pending]]:
        """The gradients computed in forward; drops those that backward has replaced."""
        replaced = [block for item, block in node.early if item in node.operation.inputs]
        self._forget(replaced)
        return [
            (item, Pending(block, is_view=False)) for item, block in node.early if item not in node.operation.inputs
        ]

    def _forget(self, blocks: Iterable[Allocation]) -> None:
        for block in blocks:
            self.meter.drop(block)

    def _make_gradient(self, item: Tensor) -> Allocation:
        return self.meter.take(item.size_bytes, _gradient_role(item))

    def _deliver(self, item: Tensor, new: Pending) -> None:
        if isinstance(item, Weight):
            self._deliver_to_weight(item, new)
            return
        old = self._pending.get(id(item))
        self._pending[id(item)] = new if old is None else self._sum(item, old, new)

    def _deliver_to_weight(self, weight: Weight, new: Pending) -> None:
        weight.arrived += 1
        if weight.pending is not None:
            new = self._sum(weight, weight.pending, new)
            weight.pending = None
        if weight.arrived < weight.uses:
            weight.pending = new
            return
        weight.arrived = 0
        if weight.gradient is not None:
            self.meter.summed(weight.size_bytes)
            self.meter.drop(new.block)
        else:
            weight.gradient = new.block
        self.hooks.weight_gradient_arrives(weight)

    def _sum(self, item: Tensor, old: Pending, new: Pending) -> Pending:
        """InputBuffer::accumulate: add in place to a gradient that is not a view and has no other owner."""
        self.meter.summed(item.size_bytes)
        if old.block.holders == 1 and not old.is_view:
            self.meter.drop(new.block)
            return old
        stream = self.hooks.weights_stream if isinstance(item, Weight) else Stream.COMPUTE
        total = self.meter.take(item.size_bytes, _gradient_role(item), stream)
        self._forget((old.block, new.block))
        return Pending(total, is_view=False)


def _product(operation: Operation) -> str | None:
    return operation.operator if operation.is_product else None


def _gradient_role(item: Tensor) -> Role:
    return Role.GRADIENTS if isinstance(item, Weight) else item.gradient_role
