"""cuBLAS workspaces: allocated once per thread and stream that multiply matrices, and kept."""

from typing import Any

import torch

from ligerprof.simulated_gpu.device import Device
from ligerprof.simulated_gpu.internals.call import Call, Internal
from ligerprof.torch_memory.libraries import LT_WORKSPACE_BYTES

aten = torch.ops.aten


def _product(call: Call) -> Any:
    """Allocate the workspace after the result (aten/src/ATen/cuda/CublasHandlePool.cpp).

    On a GPU, backward runs in a thread of autograd's, which has its own handle and workspace.
    """
    # with `out`, nothing is allocated, and the shape functions of torch 2.11 fail
    result = call.kwargs["out"] if "out" in call.kwargs else call.run()
    hold_workspaces(call.device)
    return result


def _product_and_bias(call: Call) -> Any:
    """A vector bias goes through cuBLASLt, which has its own workspace (getCUDABlasLtWorkspace)."""
    result = call.kwargs["out"] if "out" in call.kwargs else call.run()
    hold_workspaces(call.device, call.args[0])
    return result


def _grouped_product(call: Call) -> Any:
    """One product per group of rows; dtypes other than bf16 call cuBLAS once per group (GroupedMMUtils.h).

    The shape is computed in bf16, the only dtype that torch's shape function accepts.
    """
    if call.args[0].dtype == torch.bfloat16:
        return call.run()
    left, right = (
        torch.empty_strided(matrix.shape, matrix.stride(), dtype=torch.bfloat16, device="meta")
        for matrix in call.args[:2]
    )
    rest = [value.to("meta") if isinstance(value, torch.Tensor) else value for value in call.args[2:]]
    named = {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in call.kwargs.items()
    }
    shape = call.func(left, right, *rest, **named).shape
    result = torch.empty(shape, dtype=call.args[0].dtype, device=call.args[0].device)
    call.track(result)
    hold_workspaces(call.device)
    return result


def hold_workspaces(device: Device, vector_bias: torch.Tensor | None = None) -> None:
    """Keep the workspaces of a product from now on, in which a vector may have been added."""
    _hold(device, "cublas", device.gpu.cublas_workspace_bytes)
    if vector_bias is not None and vector_bias.dim() == 1:
        _hold(device, "cublaslt", LT_WORKSPACE_BYTES)


def _hold(device: Device, library: str, size_bytes: int) -> None:
    thread = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
    stream = f"stream {device.stream} " if device.stream else ""
    device.hold_workspace(f"{library} {stream}{thread}", size_bytes)


def _overloads(packet: Any) -> list[Any]:
    """The overloads that return a tensor or write to one, with or without a dtype."""
    return [getattr(packet, name) for name in packet.overloads() if name in ("default", "out", "dtype", "dtype_out")]


PRODUCT_INTERNALS: dict[Any, Internal] = {
    **{overload: _product for packet in (aten.mm, aten.bmm, aten.baddbmm) for overload in _overloads(packet)},
    **dict.fromkeys(_overloads(aten.addmm), _product_and_bias),
    **dict.fromkeys(_overloads(aten._grouped_mm), _grouped_product),
}
