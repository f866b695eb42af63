"""What kernels ask of their input tensors: rows, memory that they may overwrite, one backward pass."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ligerprof.errors import KernelInputError
from ligerprof.kernels.device import is_simulated, triton_unavailable_reason


def as_rows(x: Tensor) -> Tensor:
    """`x` with its leading axes merged into one and its last axis dense; a view if the strides allow it."""
    # flatten also takes rows without elements
    rows = x.flatten(0, -2) if x.ndim > 1 else x[None]
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def columns_of(x: Tensor) -> int:
    """Elements of a row of `x`, as a number where Dynamo traces a symbol: launches are planned for one width.

    Dynamo of torch 2.11 fails on symbols that became numbers while it traced, as the sizes of `as_rows(x)` would.
    """
    return int(x.shape[-1])


def row_stride(rows: Tensor | None, columns: int) -> int:
    """Elements from one row of so many columns to the next; 0 without rows."""
    if rows is None:
        return 0
    # Dynamo has no symbol for the stride of a gradient whose rows change in length
    return columns if torch.compiler.is_compiling() and rows.is_contiguous() else rows.stride(0)


def dense_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialized memory for a contiguous tensor shaped like `x`, in another dtype unless that is None."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def graph_is_retained() -> bool:
    """Whether the running backward pass may run again (`retain_graph=True`), so that saved tensors must stay intact."""
    # torch's own compiled backward passes check this before they free or overwrite anything
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def is_unshared(tensor: Tensor) -> bool:
    """Whether this tensor, and the one that it is a view of, are the only tensors on their memory.

    False for a tensor that checkpointing keeps as the result of a recomputed or selected operation, and for a result
    that its own operation keeps. True for a tensor that is kept as an operation's input, which is the same tensor. Fake
    tensors keep more tensors alive than real ones do: a simulation returns True for a tensor that fills its storage.
    """
    if is_simulated():
        return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    own = 1 if tensor._base is None else 2
    # torch's CUDA graphs use this count; the call itself holds one more reference
    return bool(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == own + 1)


def is_part_of_a_leaf(x: Tensor) -> bool:
    """Whether `x` is a leaf that requires a gradient, or a view of one: torch does not change these in place either."""
    whole = x if x._base is None else x._base
    return whole.is_leaf and whole.requires_grad


def overlaps_itself(x: Tensor) -> bool:
    """Whether two elements of `x` may share memory, as in an expanded tensor."""
    if x.is_contiguous():
        return False
    span = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        # each axis must step over everything that the narrower axes cover
        if size > 1 and stride < span:
            return True
        span += stride * (size - 1)
    return False


def rows_are_disjoint(first: Tensor, second: Tensor) -> bool:
    """Whether no element of one tensor of dense rows lies in the memory of the other; False if that is not certain.

    The two halves of one wider tensor are disjoint.
    """
    if first.untyped_storage()._cdata != second.untyped_storage()._cdata:
        return True
    columns, stride = int(first.shape[1]), first.stride(0)
    if first.shape != second.shape or second.stride(0) != stride or stride < 2 * columns:
        return False
    apart = abs(int(first.storage_offset()) - int(second.storage_offset())) % stride
    return columns <= apart <= stride - columns


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a linear layer of `x` computes: autocast's, or its own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def check_tensors(kernel: str, *tensors: Tensor | None, elsewhere: Sequence[Tensor | None] = ()) -> None:
    """Raise an error unless a kernel can compute with these tensors.

    Args:
        tensors: floating-point numbers, in rows of at least one, all on one device that runs Triton kernels.
        elsewhere: tensors that the kernel copies to that device, of any dtype.

    Raises:
        KernelInputError: see above; or a tensor is distributed over processes.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    if any(hasattr(tensor, "to_local") for tensor in (*given, *elsewhere)):
        raise KernelInputError(
            f"{kernel}: a DTensor was given. Give its local tensor (.to_local()), or the whole one (.full_tensor())."
        )
    for tensor in given:
        if not tensor.is_floating_point() or tensor.ndim == 0 or tensor.shape[-1] == 0:
            raise KernelInputError(
                f"{kernel}: a {tensor.dtype} tensor of shape {tuple(tensor.shape)} was given."
                " The kernel takes floating-point numbers, in rows of at least one."
            )
    if not torch.compiler.is_compiling() and not is_simulated():
        _check_devices(kernel, given)


def _check_devices(kernel: str, tensors: Sequence[Tensor]) -> None:
    device = tensors[0].device
    other = next((tensor.device for tensor in tensors if tensor.device != device), None)
    if other is not None:
        raise KernelInputError(f"{kernel}: tensors on {device} and on {other} were given. Move them to one device.")
    reason = "tensors on the device meta have no data" if device.type == "meta" else None
    if device.type == "cpu":
        reason = triton_unavailable_reason(device.type)
    if reason is not None:
        raise KernelInputError(f"{kernel}: {reason}.")


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a backward pass whose results cannot be differentiated again: an attempt raises an error.

    torch's `once_differentiable` raises it only if the incoming gradient requires a gradient. A gradient penalty's
    incoming gradient is often a constant; its second derivative would be zero without a word.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Tensor | None) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            results = backward(ctx, *grads)
        if torch.compiler.is_compiling():
            return results
        results = results if isinstance(results, tuple) else (results,)
        fail = torch._C._functions.DelayedError(_SECOND_ORDER, len(results))
        return fail(*(None if value is None else value.detach().requires_grad_() for value in results))  # type: ignore[arg-type]

    return wrapper


_SECOND_ORDER = (
    b"this kernel of ligerprof has no second derivative. For a gradient penalty, use the provider torch (plain torch)."
)
