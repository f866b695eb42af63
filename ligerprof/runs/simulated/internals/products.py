"""cuBLAS workspaces, taken once for each thread that multiplies matrices, and never given back."""

from typing import Any

import torch

from ligerprof.runs.simulated.internals.call import Call, Internal

aten = torch.ops.aten


def _product(call: Call) -> Any:
    """Takes the thread's workspace after its result (aten/src/ATen/cuda/CublasHandlePool.cpp, getCUDABlasWorkspace).

    A GPU's backward runs in autograd's own thread, which has its own handle and so its own workspace.
    """
    result = call.run()
    call.device.ensure_blas_workspace(in_backward=torch._C._current_graph_task_id() != -1)
    return result


PRODUCT_INTERNALS: dict[Any, Internal] = {
    aten.mm.default: _product,
    aten.bmm.default: _product,
    aten.addmm.default: _product,
    aten.baddbmm.default: _product,
}
