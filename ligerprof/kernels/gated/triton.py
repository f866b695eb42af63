"""Launch the kernels of gated activations, act(gate) * up, which differ in `act` alone.

N rows, I intermediate columns.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import torch
import triton
from torch import Tensor

from ligerprof.errors import KernelInputError
from ligerprof.kernels.device import on_device
from ligerprof.kernels.rows.triton import as_rows

# launch: a piece of one row a program, whatever the row's width, and neighbours in memory one after the other
BLOCK = 1024
WARPS = 4


def check_shapes(name: str, gate: Tensor, up: Tensor) -> None:
    """Refuse inputs that are not two of a kind.

    Raises:
        KernelInputError: shapes or dtypes that differ.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise KernelInputError(
            f"{name}: gate {tuple(gate.shape)} {gate.dtype} and up {tuple(up.shape)} {up.dtype} must be alike."
        )


def launch_forward(kernel: Any, gate: Tensor, up: Tensor) -> Tensor:
    """act(gate) * up, contiguous."""
    gate_NI, up_NI = as_rows(gate), as_rows(up)
    rows, columns = gate_NI.shape
    pieces = triton.cdiv(columns, BLOCK)
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    with on_device(gate):
        kernel[(rows * pieces,)](
            gate_NI, up_NI, y, gate_NI.stride(0), up_NI.stride(0), columns, pieces, BLOCK=BLOCK, num_warps=WARPS
        )
    return y


def launch_backward(kernel: Any, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up, contiguous."""
    grad_NI, gate_NI, up_NI = as_rows(grad), as_rows(gate), as_rows(up)
    rows, columns = gate_NI.shape
    pieces = triton.cdiv(columns, BLOCK)
    gate_grad, up_grad = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    with on_device(gate):
        kernel[(rows * pieces,)](
            grad_NI,
            gate_NI,
            up_NI,
            gate_grad,
            up_grad,
            grad_NI.stride(0),
            gate_NI.stride(0),
            up_NI.stride(0),
            columns,
            pieces,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return gate_grad, up_grad
