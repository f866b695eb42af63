"""How much workspace the fused loss may take, by what the process has held so far: `auto` in a loop of one's own."""

from typing import TYPE_CHECKING

from ligerprof.kernels.linear_cross_entropy.plan import plan_chunks
from ligerprof.kernels.spec import KernelShape, KernelSpec
from ligerprof.units import MIB

if TYPE_CHECKING:
    from torch import Tensor

# calls before the highest moment is taken for the step's: a whole step has passed, its optimizer's states are there
_WARM_UP_CALLS = 2
# blocks that the allocator hands out whole may be up to a mebibyte larger than what was asked for
_MARGIN_BYTES = 8 * MIB


class MeasuredBudget:
    """The room between what is allocated when the loss begins and the most that ever was.

    The first calls are `lean`. What a later call finds is kept as long as none finds less, so that the loss never
    raises the peak, and training takes the same chunks from some step on.

    Args:
        spec: the fused loss; what it takes beside its workspace follows from its stated memory.
    """

    def __init__(self, spec: KernelSpec) -> None:
        self._spec = spec
        self._calls = 0
        self._highest_bytes = 0
        self._budget_bytes: int | None = None

    def next(self, hidden: "Tensor", weight: "Tensor") -> str | int:
        """The budget of a call on these tensors, which lie on a CUDA device."""
        import torch

        self._highest_bytes = max(self._highest_bytes, torch.cuda.max_memory_allocated(hidden.device))
        self._calls += 1
        if self._calls <= _WARM_UP_CALLS:
            return "lean"
        room_bytes = self._highest_bytes - torch.cuda.memory_allocated(hidden.device) - _MARGIN_BYTES
        kind = hidden.device.type
        product_dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        return self._within(room_bytes, _shape(hidden, weight, product_dtype.itemsize))

    def _within(self, room_bytes: int, shape: KernelShape) -> str | int:
        """What is left of the room beside gradients, losses and casts."""
        lean_bytes = plan_chunks(
            tokens=shape.tokens,
            hidden=shape.hidden,
            vocab=shape.vocab,
            element_bytes=shape.product_bytes,
            budget="lean",
            gradient_bytes=shape.parameter_bytes if shape.weight_requires_grad else 0,
        ).workspace_bytes
        assert self._spec.memory is not None, "plain torch has no workspace to size"
        memory = self._spec.memory(shape)
        forward_bytes = memory.output_bytes + memory.saved_bytes + memory.forward_gradient_bytes
        beside_bytes = forward_bytes + memory.forward_temporary_bytes - lean_bytes
        left_bytes = room_bytes - beside_bytes
        if self._budget_bytes is not None:
            left_bytes = min(left_bytes, self._budget_bytes)
        self._budget_bytes = left_bytes
        return left_bytes if left_bytes > lean_bytes else "lean"


def _shape(hidden: "Tensor", weight: "Tensor", product_bytes: int) -> KernelShape:
    """The call as the fused loss's memory formula sees it; what it does not read is 1."""
    vocab, width = weight.shape
    return KernelShape(
        tokens=hidden.numel() // width,
        sequences=hidden.shape[0],
        hidden=width,
        intermediate=1,
        vocab=vocab,
        heads=1,
        kv_heads=1,
        head_dim=1,
        activation_bytes=hidden.element_size(),
        parameter_bytes=weight.element_size(),
        compute_bytes=product_bytes,
        weight_requires_grad=weight.requires_grad,
        flce_budget="lean",
    )
