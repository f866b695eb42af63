"""cuBLAS workspaces, taken once for each thread that multiplies matrices, and never given back."""

from typing import Any

import torch

from ligerprof.runs.simulated.internals.call import Call, Internal

aten = torch.ops.aten

# parseCUDABlasLtWorkspaceSize: 1024 KiB where CUBLASLT_WORKSPACE_SIZE is not set; measured on one H200 with torch 2.11
_LT_WORKSPACE_BYTES = 1024 * 1024


def _product(call: Call) -> Any:
    """Takes the thread's workspace after its result (aten/src/ATen/cuda/CublasHandlePool.cpp, setWorkspaceForHandle).

    A GPU's backward runs in autograd's own thread, which has its own handle and so its own workspace.
    """
    # into a given tensor there is nothing to make, and fake tensors of torch 2.11 cannot
    result = call.kwargs["out"] if "out" in call.kwargs else call.run()
    _hold(call, "cublas", call.device.gpu.cublas_workspace_bytes)
    return result


def _product_and_bias(call: Call) -> Any:
    """A bias that is a vector goes through cuBLASLt, which takes a second workspace (getCUDABlasLtWorkspace)."""
    result = _product(call)
    if call.args[0].dim() == 1:
        _hold(call, "cublaslt", _LT_WORKSPACE_BYTES)
    return result


def _hold(call: Call, library: str, size_bytes: int) -> None:
    thread = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
    call.device.hold_for_good(f"{library} {thread}", size_bytes)


def _overloads(packet: Any) -> list[Any]:
    """The operator however its result and its type are asked for."""
    return [getattr(packet, name) for name in packet.overloads() if name in ("default", "out", "dtype", "dtype_out")]


PRODUCT_INTERNALS: dict[Any, Internal] = {
    **{overload: _product for packet in (aten.mm, aten.bmm, aten.baddbmm) for overload in _overloads(packet)},
    **dict.fromkeys(_overloads(aten.addmm), _product_and_bias),
}
