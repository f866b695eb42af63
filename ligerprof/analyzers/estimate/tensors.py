"""The tensors of a traced model: parameters, and values computed in a forward pass."""

from dataclasses import dataclass

from ligerprof.analyzers.estimate.meter import Allocation
from ligerprof.roles import Role


@dataclass(slots=True, eq=False)
class Pending:
    """A gradient on its way to a tensor.

    Attributes:
        is_view: whether it is a view, so that another one is not added in place.
    """

    block: Allocation
    is_view: bool


@dataclass(slots=True, eq=False)
class Weight:
    """A parameter. Its own bytes are static; its gradient is allocated in backward.

    Attributes:
        width: bytes per element.
        uses: reads per forward pass (2 for a tied embedding).
        shape: the parameter's shape.
        layer: the index of its decoder layer; None if it belongs to none.
        in_embedding: whether it belongs to an embedding of tokens or positions.
        is_adapter: whether LoRA adds it.
        packed_sizes: bytes of each tensor of a quantized parameter, else empty.
        recorded: whether autograd records what reads it; False under no_grad.
        gradient: the gradient once it exists; later micro-batches add to it.
        pending: the sum of the gradients of some uses, until all have arrived.
    """

    elements: int
    width: int
    trainable: bool = True
    uses: int = 1
    shape: tuple[int, ...] = ()
    layer: int | None = None
    in_embedding: bool = False
    is_adapter: bool = False
    packed_sizes: tuple[int, ...] = ()
    recorded: bool = True
    gradient: Allocation | None = None
    pending: Pending | None = None
    arrived: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor, and of its gradient."""
        return self.elements * self.width

    @property
    def stored_sizes(self) -> tuple[int, ...]:
        """Bytes of each tensor that holds the parameter."""
        return self.packed_sizes or (self.size_bytes,)

    @property
    def needs_gradient(self) -> bool:
        """Whether backward computes its gradient."""
        return self.trainable and self.recorded


@dataclass(slots=True, eq=False)
class Value:
    """A tensor computed in a forward pass.

    Attributes:
        block: its memory; None if recomputation stopped before it.
        gradient_role: the role of its gradient.
    """

    elements: int
    width: int
    needs_gradient: bool
    block: Allocation | None
    gradient_role: Role = Role.ACTIVATIONS

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor, and of its gradient."""
        return self.elements * self.width

    @property
    def trainable(self) -> bool:
        """False: it is not a parameter, even if it is read as one."""
        return False


Tensor = Weight | Value
