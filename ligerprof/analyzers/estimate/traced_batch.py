"""Replay a tape on a meter: forward and backward of one micro-batch through a traced model."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ligerprof.analyzers.estimate.hooks import Hooks, Part
from ligerprof.analyzers.estimate.meter import Allocation, Meter
from ligerprof.analyzers.estimate.places import EMBEDDING, HEAD, WHOLE
from ligerprof.analyzers.estimate.tensors import Weight
from ligerprof.analyzers.estimate.traced import Repetition, traced_layers
from ligerprof.models.tape import Event, Ref, Tape, Unit
from ligerprof.recipe.categories import Engine
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Role


@dataclass(slots=True, eq=False)
class _Run:
    """A unit between its forward and its backward.

    Attributes:
        blocks: by number.
        saved: what each node holds.
        stream: numbers of the blocks that checkpointing keeps for the next layer.
        inputs: what checkpointing keeps to run the layer again.
        inner: nodes of a checkpointed layer, whose saved tensors hooks unpack.
        again: whether the layer has run again.
        recomputed: nodes that have yet to free what this run has saved.
    """

    blocks: list[Allocation] = field(default_factory=list)
    saved: dict[int, list[Allocation]] = field(default_factory=dict)
    inputs: list[Allocation] = field(default_factory=list)
    stream: frozenset[int] = frozenset()
    inner: set[int] = field(default_factory=set)
    again: bool = False
    recomputed: set[int] = field(default_factory=set)


class TracedMicroBatch:
    """One pass over a traced model on a meter that holds already what is static; `MicroBatch` runs forms instead."""

    def __init__(self, recipe: TrainingRecipe, weights: Mapping[str, Weight], meter: Meter, hooks: Hooks) -> None:
        assert recipe.spec.tape is not None
        self._recipe, self._weights, self._meter = recipe, weights, meter
        self._hooks = hooks
        self._tape: Tape = recipe.spec.tape
        self._sizes = self._tape.values(recipe.rows, recipe.row_tokens)
        self._touched = self._tape.touched(self._sizes, recipe.gpu_spec)
        self._last = len(self._tape.order) - 1
        traced = traced_layers(recipe)
        self._places = {
            index: each.place(each.representative(index)) for each in traced for index in range(each.first, each.end)
        }
        # what each layer leaves to others is known to the byte where it runs
        folds = recipe.engine not in (Engine.TORCH, Engine.DDP)
        self._traced = traced if folds else [Repetition(index) for index in sorted(self._places)]
        self._repetitions = [each for each in self._traced for _ in range(each.period * each.times)]
        self._runs: dict[int, _Run] = {}

    @property
    def offloaded_bytes(self) -> int:
        """Main memory that saved tensors take."""
        return 0 if self._tape.offloaded is None else self._sizes[self._tape.offloaded]

    def forward(self) -> None:
        """Run the model's forward pass; what is left is what backward needs."""
        self._hooks.enter(Part.ROOT)
        self._meter.place = EMBEDDING
        self._hooks.enter(Part.EMBEDDING)
        self._forward(0)
        self._hooks.leave(Part.EMBEDDING)
        for repetition in self._traced:
            self._repeat(repetition, self._layer_forward, repetition.indices, backward=False)
        self._meter.place = HEAD
        for part in (Part.NORM, Part.HEAD):
            self._hooks.enter(part)
        if self._last:
            self._forward(self._last)
        for part in (Part.NORM, Part.HEAD, Part.ROOT):
            self._hooks.leave(part)

    def backward(self) -> None:
        """Run the backward pass; what is left are the gradients of the weights."""
        self._meter.place = HEAD
        for part in (Part.ROOT, Part.HEAD):
            self._hooks.gradient_arrives(part)
        if self._last:
            self._backward(self._last)
        self._hooks.gradient_leaves(Part.NORM)
        for repetition in reversed(self._traced):
            self._repeat(repetition, self._layer_backward, reversed(repetition.indices), backward=True)
        self._meter.place = EMBEDDING
        self._hooks.gradient_arrives(Part.EMBEDDING)
        self._backward(0)
        self._meter.place = WHOLE
        self._hooks.end_backward()
        for position, run in self._runs.items():
            for ref in self._tape.unit(position).graph:
                self._meter.drop(self._block(ref, position, run))

    def _repeat(
        self, repetition: Repetition, act: Callable[[int], None], indices: Iterable[int], *, backward: bool
    ) -> None:
        def run() -> None:
            for index in indices:
                self._meter.place = self._places[index]
                act(index)

        first = repetition.first
        self._meter.repeat(repetition.times, run, repetition.places, first_layer=first, backward=backward)

    def _layer_forward(self, index: int) -> None:
        self._hooks.enter(index)
        self._forward(1 + index)

    def _layer_backward(self, index: int) -> None:
        self._hooks.gradient_arrives(index)
        self._backward(1 + index)
        self._hooks.gradient_leaves(index)

    def _forward(self, position: int) -> None:
        meter, run = self._meter, _Run()
        self._runs[position] = run
        if self._is_checkpointed(position + 1):
            run.stream = self._tape.stream(position)
        saving = True
        for event in self._tape.unit(position).forward:
            kind = event[0]
            if kind == "save":
                if saving and event[2] is not None:
                    block = meter.keep(self._block(event[2], position, run))
                    run.saved.setdefault(event[1], []).append(block)
            elif kind == "enter":
                if self._is_checkpointed(position):
                    saving = False
                    run.inputs = [meter.keep(self._block(ref, position, run)) for ref in event[1]]
            elif kind == "leave":
                saving = True
                self._hooks.leave(position - 1)
            else:
                self._run_common(event, position, run)

    def _run_common(self, event: Event, position: int, run: _Run) -> None:
        """An event that both passes have."""
        kind, meter = event[0], self._meter
        if kind == "take":
            role = Role.CHECKPOINTS if len(run.blocks) in run.stream else event[2]
            run.blocks.append(meter.take(self._sizes[event[1]], role))
        elif kind == "touch":
            meter.run_scratch(self._touched[event[1]], event[2])
        elif kind == "multiply":
            meter.multiply(adds_bias=True)
        elif kind == "arrive":
            self._arrive(event[1], position, self._block(event[2], position, run))
        else:
            self._end(event[1], position, run)

    def _is_checkpointed(self, position: int) -> bool:
        inside = 0 < position < self._last
        return inside and self._recipe.checkpoints_layer(self._tape.numbers[position - 1])

    def _backward(self, position: int) -> None:
        run, unit = self._runs[position], self._tape.unit(position)
        run.inner = _nodes_inside(unit) if run.inputs else set()
        for event in unit.backward:
            kind = event[0]
            if kind == "start":
                if event[1] in run.inner and not run.again:
                    run.again, run.recomputed = True, set(run.inner)
                    self._recompute(unit, position, run)
            elif kind == "hold":
                self._meter.keep(self._block(event[1], position, run))
            elif kind not in ("unpacked", "release"):
                self._run_common(event, position, run)
            elif (kind == "unpacked") == (event[1] in run.inner):
                self._release(event[1], run)
        self._drop(run.inputs)
        run.inputs = []

    def _release(self, node: int, run: _Run) -> None:
        """A node frees what it has saved; with the last of a checkpointed layer, the layer's inputs end."""
        self._drop(run.saved.pop(node, ()))
        if node in run.recomputed:
            run.recomputed.discard(node)
            if not run.recomputed:
                self._drop(run.inputs)
                run.inputs = []

    def _recompute(self, unit: Unit, position: int, run: _Run) -> None:
        """torch.utils.checkpoint runs the layer again up to the last tensor that it saves."""
        meter = self._meter
        again: list[Allocation] = []
        variables: dict[int, Allocation] = {}
        for event in unit.forward[: _after_last_save(unit.forward)]:
            kind = event[0]
            if kind == "take":
                block = meter.take(self._sizes[event[1]], event[2])
                variables[len(again)] = block
                again.append(block)
            elif kind == "touch":
                meter.run_scratch(self._touched[event[1]], event[2])
            elif kind == "drop":
                if isinstance(event[1], int) and (ended := variables.pop(event[1], None)) is not None:
                    meter.drop(ended)
            elif kind == "save" and event[2] is not None:
                ref = event[2]
                new = isinstance(ref, int) and ref < len(again)
                block = again[ref] if new else self._block(ref, position, run)
                run.saved.setdefault(event[1], []).append(meter.keep(block))
        self._drop(variables.values())
        # what outlives the nodes that have saved it is of this run
        for number in _held(unit):
            if number < len(again):
                run.blocks[number] = again[number]

    def _arrive(self, name: str, position: int, block: Allocation) -> None:
        """A gradient of a parameter is there: it stays, or is added to the one that is there."""
        meter = self._meter
        path = self._tape.layers[position - 1] if name.startswith("{}") else ""
        weight = self._weights[name.replace("{}", path, 1)]
        if weight.gradient is not None:
            meter.drop(block)
        else:
            weight.gradient = block
        self._hooks.weight_gradient_arrives(weight)

    def _end(self, ref: Ref, position: int, run: _Run) -> None:
        """A variable ends; where code outside the layers ends blocks of layers that repeat, in all of them at once."""
        meter, (other, _) = self._meter, self._tape.position_of(ref, position)
        if other == position or not 0 < other < self._last or 0 < position < self._last:
            meter.drop(self._block(ref, position, run))
        elif (repetition := self._repetitions[other - 1]).representative(other - 1) == other - 1:
            place, meter.place = meter.place, repetition.place(other - 1)
            act, first = (lambda: meter.drop(self._block(ref, position, run))), repetition.first
            meter.repeat(repetition.times, act, repetition.places, first_layer=first)
            meter.place = place

    def _block(self, ref: Ref, position: int, run: _Run) -> Allocation:
        if isinstance(ref, int):
            return run.blocks[ref]
        other, number = self._tape.position_of(ref, position)
        return self._runs[self._that_ran(other, position)].blocks[number]

    def _that_ran(self, other: int, position: int) -> int:
        """The position whose unit ran in place of another's, as seen from a unit that runs."""
        if not 0 < other < self._last:
            return other
        repetition = self._repetitions[other - 1]
        if other > position and position - 1 in repetition.indices and other - 1 not in repetition.indices:
            # backward comes from the layers after all repetitions
            return other + repetition.period * (repetition.times - 1)
        return 1 + repetition.representative(other - 1)

    def _drop(self, blocks: Iterable[Allocation]) -> None:
        for block in blocks:
            self._meter.drop(block)


def _inside(events: Sequence[Event]) -> Sequence[Event]:
    """The events between those that enter and leave a layer."""
    kinds = [event[0] for event in events]
    return events[kinds.index("enter") : kinds.index("leave")]


def _nodes_inside(unit: Unit) -> set[int]:
    return {event[1] for event in _inside(unit.forward) if event[0] == "save" and event[1] is not None}


def _held(unit: Unit) -> Iterator[int]:
    """Blocks of a unit that have a holder more in backward."""
    for kind, *rest in unit.backward:
        if kind == "hold" and isinstance(rest[0], int):
            yield rest[0]


def _after_last_save(events: Sequence[Event]) -> int:
    """The number of events up to the last tensor that a layer saves."""
    kinds = [event[0] for event in events]
    inside = kinds[: kinds.index("leave")]
    return max((index + 1 for index, kind in enumerate(inside) if kind == "save"), default=0)
