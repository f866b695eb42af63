"""A tensor operation, with what autograd keeps of it."""

from dataclasses import dataclass

from ligerprof.analyzers.estimate.tensors import Tensor, Value
from ligerprof.roles import Role
from ligerprof.torch_memory.dtypes import Scratch
from ligerprof.torch_memory.saved_tensors import FactorShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One torch operation with one output tensor.

    Attributes:
        elements, width: the output.
        inputs: tensors whose gradients are allocated, in their own size.
        sums: inputs whose gradients so far backward takes as well, and replaces by their sums with its own.
        passes: tensors that receive the output's gradient itself, or a view of it.
        reuses: inputs whose gradients overwrite their saved tensors.
        early: inputs whose gradients are computed in the forward pass, with their bytes; for one that is
            also among `inputs`, backward allocates a new gradient and frees the early one.
        saves: tensors that autograd keeps for the backward of this operation.
        pins: inputs that a Python autograd Function keeps as attributes, which no hook of checkpointing sees: they
            live as long as the graph, if they need a gradient.
        saves_output: whether autograd keeps the output as well.
        extra_saved_bytes: other memory allocated for backward (statistics, dropout masks): one block, or several.
        saves_first: whether that comes before the output.
        other_saves: number of further tensors that autograd keeps: parameters, indices, and parts of the extra bytes.
        view_of: the tensor whose memory the output shares.
        leading_scratch, leading_gradient_scratch: temporaries before the output, and before gradients; what these do
            not free is freed by the temporaries below, or after them.
        forward_scratch_bytes, backward_scratch_bytes: temporaries of the operation and of its gradient,
            beyond outputs and gradients: one block, or blocks in their order.
        unreduced_bytes: a gradient before it is summed to its tensor's shape, from the gradient function until then.
        sums_first: whether that is the first gradient, and not the last.
        reduction_scratch_bytes: allocated and freed when the engine sums gradients to their tensors' shapes: after
            the gradient function has returned, while its results and inputs are still there.
        role: the role of the output, of saved memory and of temporaries.
        gradient_role: the role of the output's gradient.
        gradient_is_view: whether gradients are views (`mm(...).view`), so that a second one is not added in place.
        is_product: whether cuBLAS runs it.
        in_function: whether it is a Python autograd Function, which saves after computing its output.
        operator: the name by which selective checkpointing may keep the output; empty for other operators.
        always_kept: whether selective checkpointing keeps the output: one block for several outputs that it keeps.
        factor: inputs and outputs of the weight of a product of matrices, by which checkpointing may leave it out.
    """

    elements: int
    width: int
    inputs: tuple[Tensor, ...] = ()
    sums: tuple[Value, ...] = ()
    passes: tuple[Tensor, ...] = ()
    reuses: tuple[Value, ...] = ()
    early: tuple[tuple[Tensor, int], ...] = ()
    saves: tuple[Tensor, ...] = ()
    pins: tuple[Value, ...] = ()
    saves_output: bool = False
    extra_saved_bytes: int | tuple[int, ...] = 0
    saves_first: bool = False
    other_saves: int = 0
    view_of: Tensor | None = None
    leading_scratch: Scratch = ()
    leading_gradient_scratch: Scratch = ()
    forward_scratch_bytes: int | Scratch = 0
    backward_scratch_bytes: int | Scratch = 0
    unreduced_bytes: int = 0
    sums_first: bool = False
    reduction_scratch_bytes: int | Scratch = 0
    role: Role = Role.ACTIVATIONS
    gradient_role: Role = Role.ACTIVATIONS
    scratch_role: Role | None = None
    gradient_is_view: bool = False
    is_product: bool = False
    in_function: bool = False
    operator: str = ""
    always_kept: bool = False
    factor: FactorShape | None = None

    @property
    def saves_anything(self) -> bool:
        """Whether autograd keeps a tensor for this operation's backward."""
        return bool(self.saves or self.early) or self.saves_output or bool(self.extra_blocks)

    @property
    def extra_blocks(self) -> tuple[int, ...]:
        """Sizes of the other blocks that are allocated for backward."""
        sizes = self.extra_saved_bytes
        return tuple(size for size in ((sizes,) if isinstance(sizes, int) else sizes) if size)

    @property
    def differentiable(self) -> tuple[Tensor, ...]:
        """All inputs that may receive a gradient."""
        return (*self.inputs, *self.passes, *self.reuses, *(item for item, _ in self.early))
