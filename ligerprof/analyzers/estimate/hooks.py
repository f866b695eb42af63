"""What an engine does around the modules of a model and when gradients arrive; plain torch does nothing."""

from ligerprof.analyzers.estimate.meter import Allocation, Stream
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.tensors import Weight
from ligerprof.words import Word


class Part(Word):
    """A module outside the decoder layers that hooks may be on."""

    ROOT = "root"
    EMBEDDING = "embedding"
    NORM = "norm"
    HEAD = "head"


# a part, or the index of a decoder layer
Module = Part | int


class Hooks:
    """The hooks of an engine without any.

    Attributes:
        reduces: whether the current micro-batch reduces gradients over the ranks; with ZeRO, whether it is the last.
        weights_stream: the stream on which weights were made ready, where autograd adds their gradients.
    """

    reduces: bool = True
    weights_stream: Stream = Stream.COMPUTE

    def start_step(self) -> None:
        """The step begins: what is static is there."""

    def enter(self, module: Module) -> None:
        """Before a module's forward."""

    def leave(self, module: Module) -> None:
        """After a module's forward."""

    def gradient_arrives(self, module: Module) -> None:
        """The gradient of a module's output is there."""

    def gradient_leaves(self, module: Module) -> None:
        """The gradient of a module's input is there."""

    def before_module(self, weight: Weight) -> None:
        """Before the first operation of a module that does not read its weight at once."""

    def before_read(self, operation: Operation) -> None:
        """Before an operation of the forward pass, which may read weights."""

    def after_read(self, operation: Operation) -> None:
        """After it."""

    def block_of(self, weight: Weight) -> Allocation | None:  # noqa: ARG002 - of engines that gather
        """What holds a weight now, if it is gathered."""
        return None

    def before_gradient(self, operation: Operation) -> None:
        """Before an operation's gradients are computed."""

    def after_gradient(self, operation: Operation) -> None:
        """After they have arrived."""

    def weight_gradient_arrives(self, weight: Weight) -> None:
        """A weight's gradient of this micro-batch is complete."""

    def end_backward(self) -> None:
        """Autograd's engine runs its last callbacks."""

    def end_step(self) -> None:
        """The passes have ended, and the optimizer's step begins."""
