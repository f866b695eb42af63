"""NaN around tensors and in new memory: what a kernel reads or writes beyond its tensors shows in its results."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# elements on each side, more than one block of a small kernel
_MARGIN = 4096
WRITES_OUTSIDE = "writes outside of"
_UNINITIALIZED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


class Guards(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Surrounds tensors by NaN: those given to `surround`, and while it is active, uninitialized new memory.

    New memory of floating-point numbers is filled with NaN, too.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._guarded: list[tuple[str, Tensor, int]] = []

    def surround(self, name: str, value: Tensor) -> Tensor:
        """A copy of a tensor, with its gradient, in the middle of a larger one; integers come back as they are."""
        if not _can_be_guarded(value):
            return value
        margin = value.new_full((_MARGIN,), math.nan)
        buffer = torch.cat((margin, value.flatten(), margin))
        self._guarded.append((f"its input {name}", buffer.detach(), value.numel()))
        return buffer[_MARGIN:-_MARGIN].view(value.shape)

    def raise_if_written(self) -> None:
        """Raise ValueError if a kernel wrote outside of a tensor."""
        for name, buffer, elements in self._guarded:
            before, after = buffer[:_MARGIN], buffer[_MARGIN + elements :]
            if not (before.isnan().all() and after.isnan().all()):
                raise ValueError(f"it {WRITES_OUTSIDE} {name}")

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name.removeprefix("aten::") not in _UNINITIALIZED or not _can_be_guarded(result):
            return result
        span = 1 + sum(stride * (size - 1) for size, stride in zip(result.shape, result.stride(), strict=True))
        buffer = torch.full((2 * _MARGIN + span,), math.nan, dtype=result.dtype, device=result.device)
        self._guarded.append((f"a tensor of the sizes {list(result.shape)} that it allocates", buffer, span))
        return buffer.as_strided(result.shape, result.stride(), _MARGIN)


def _can_be_guarded(value: Tensor) -> bool:
    return value.is_floating_point() and value.numel() > 0
