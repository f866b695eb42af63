"""Tensors that several decoder layers read: keys and values that some reuse, and one tensor with all layers' inputs."""

from ligerprof.analyzers.estimate.meter import Allocation, Meter
from ligerprof.analyzers.estimate.tape import Tape
from ligerprof.analyzers.estimate.tensors import Value
from ligerprof.models.layer_kinds import LayerKinds
from ligerprof.roles import Role


class AcrossLayers:
    """What layers share in one micro-batch, and the gradients that wait for the layer that made it.

    Attributes:
        states: key and value that layers reuse, by whether these layers have a window.
    """

    def __init__(self, meter: Meter, kinds: LayerKinds) -> None:
        self._meter, self._kinds = meter, kinds
        self.states: dict[bool, tuple[Value, Value]] = {}
        self._held: dict[bool, list[Allocation]] = {}
        self._gradients: dict[tuple[bool, int], Allocation] = {}
        self._inputs: Value | None = None
        self._input_gradient: Allocation | None = None
        self._views: dict[int, Value] = {}

    def hold_inputs(self, inputs: Value) -> None:
        """Take the inputs of all layers, which the decoder holds."""
        self._inputs = inputs

    def input_of(self, index: int) -> Value:
        """The input of one layer: a view."""
        assert self._inputs is not None
        if index not in self._views:
            joint = self._inputs
            elements = joint.elements // len(self._kinds.windowed)
            self._views[index] = Value(elements, joint.width, joint.needs_gradient, joint.block)
        return self._views[index]

    def store(self, tape: Tape, windowed: bool, key: Value, value: Value) -> None:
        """Keep key and value for later layers, in place of those of a first pass.

        Recomputed ones hold the graph that they are of, and with it what its operations have saved.
        """
        self._drop(windowed)
        self.states[windowed] = key, value
        graph = tape.saved_before(key, value)
        self._held[windowed] = [self._meter.keep(block) for block in graph]
        self._held[windowed] += [self._meter.keep(item.block) for item in (key, value) if item.block is not None]

    def deliver(self, tape: Tape, index: int) -> None:
        """Hand the gradients of what a layer stored to its backward, which is about to begin."""
        if self._kinds.sharing[index] != "stores":
            return
        windowed = self._kinds.windowed[index]
        for at, item in enumerate(self.states[windowed]):
            gradient = self._gradients.pop((windowed, at), None)
            if gradient is not None:
                tape.expect(item, gradient)

    def collect(self, tape: Tape, index: int) -> None:
        """Take the gradients of what a layer read, whose backward has ended: they are added up in place."""
        windowed = self._kinds.windowed[index]
        if self._kinds.sharing[index] == "reuses":
            for at, item in enumerate(self.states[windowed]):
                gradient = tape.take_gradient(item)
                if gradient is None:
                    continue
                if self._gradients.setdefault((windowed, at), gradient) is not gradient:
                    self._meter.drop(gradient)
        joint = self._inputs
        gradient = None if joint is None else tape.take_gradient(self.input_of(index))
        if joint is None or gradient is None:
            return
        # zeros as large as all inputs, with one layer's part
        whole = self._meter.take(joint.size_bytes, Role.ACTIVATIONS)
        self._meter.drop(gradient)
        if self._input_gradient is None:
            self._input_gradient = whole
        else:
            self._meter.drop(whole)

    def end(self, tape: Tape) -> None:
        """Whatever held these tensors besides the layers ends: the decoder's forward, or the last checkpoint."""
        for windowed in tuple(self._held):
            self._drop(windowed)
        if self._inputs is not None:
            tape.release(self._inputs)

    def deliver_inputs(self, tape: Tape) -> None:
        """Hand the gradient of the inputs to the backward of what made them."""
        if self._inputs is not None and self._input_gradient is not None:
            tape.expect(self._inputs, self._input_gradient)
            self._input_gradient = None

    def _drop(self, windowed: bool) -> None:
        for block in self._held.pop(windowed, ()):
            self._meter.drop(block)
