"""Choose the fused loss's workspace from the memory peak of the process so far: `auto` in a user's own loop."""

from typing import TYPE_CHECKING

from ligerprof.kernels.linear_cross_entropy.plan import plan_chunks
from ligerprof.kernels.spec import KernelShape, KernelSpec
from ligerprof.units import MIB

if TYPE_CHECKING:
    from torch import Tensor

# after these calls a whole step has passed and the optimizer's states exist, so that the peak is that of a step
_WARM_UP_CALLS = 2
# the allocator may return blocks up to 1 MiB larger than requested without splitting them
_MARGIN_BYTES = 8 * MIB


class MeasuredBudget:
    """The room between the memory allocated when the loss begins and the peak so far.

    The first calls are `lean`. The budget never grows afterwards, so that the loss does not raise the peak and its
    chunks stay the same after some steps.
    """

    def __init__(self, spec: KernelSpec) -> None:
        self._spec = spec
        self._calls = 0
        self._highest_bytes = 0
        self._budget_bytes: int | None = None

    def next(self, hidden: "Tensor", weight: "Tensor", rank: int = 0) -> str | int:
        """The budget of a call on these CUDA tensors; `rank`: of the adapters on the head."""
        import torch

        self._highest_bytes = max(self._highest_bytes, torch.cuda.max_memory_allocated(hidden.device))
        self._calls += 1
        if self._calls <= _WARM_UP_CALLS:
            return "lean"
        room_bytes = self._highest_bytes - torch.cuda.memory_allocated(hidden.device) - _MARGIN_BYTES
        kind = hidden.device.type
        product_dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        shape = _shape(hidden, weight, product_dtype.itemsize, rank)
        lean_bytes = plan_chunks(
            tokens=shape.tokens,
            hidden=shape.hidden,
            vocab=shape.vocab,
            element_bytes=shape.product_bytes,
            budget="lean",
            gradient_bytes=0 if rank or not shape.weight_requires_grad else shape.parameter_bytes,
        ).workspace_bytes
        assert self._spec.memory is not None, "plain torch has no workspace to size"
        memory = self._spec.memory(shape)
        forward_bytes = memory.output_bytes + memory.saved_bytes + memory.forward_gradient_bytes
        # gradients, losses and casts take part of the room
        left_bytes = room_bytes - (forward_bytes + memory.forward_temporary_bytes - lean_bytes)
        if self._budget_bytes is not None:
            left_bytes = min(left_bytes, self._budget_bytes)
        self._budget_bytes = left_bytes
        return left_bytes if left_bytes > lean_bytes else "lean"


def _shape(hidden: "Tensor", weight: "Tensor", product_bytes: int, rank: int) -> KernelShape:
    """The call's shape; sizes that the fused loss's memory does not depend on are 1."""
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
        low_rank=rank,
        flce_budget="lean",
    )
