"""What torch.linalg.svd takes on a GPU: cuSOLVER's Jacobi method, on a copy of the matrix.

`svd_cusolver_gesvdj` in aten/src/ATen/native/cuda/linalg/BatchLinearAlgebraLib.cpp. The workspace is what cuSOLVER of
CUDA 13 asked for on an H200 (benchmarks/results/galore-svd-h200.jsonl); each of its rules gives all measured sizes.
"""

from ligerprof.torch_memory.dtypes import FP32_BYTES
from ligerprof.torch_memory.scratch import Scratch

# of the shorter side; smaller matrices follow other rules
_SMALLEST_SIDE = 512
# of the longer side to the shorter one; between 1 and this, nothing was measured
_SMALLEST_RATIO = 1.5
_STATUS_BYTES = 4


def svd_workspace_bytes(rows: int, columns: int) -> int | None:
    """Bytes of cuSOLVER's workspace for an fp32 matrix; None for shapes whose rule is not known."""
    long, short = max(rows, columns), min(rows, columns)
    if short < _SMALLEST_SIDE or 1 < long / short < _SMALLEST_RATIO:
        return None
    if long == short:
        elements = 2 * short**2 + short**2 // 256 + 65 * short + 32 * -(-short // 1024) + 1024
        return elements * FP32_BYTES
    # a wide matrix is transposed
    elements = long * short * (2 if rows < columns else 1) + 256 * long + short**2 + 514 * short + 65_792
    return elements * FP32_BYTES


def svd_scratch(rows: int, columns: int) -> Scratch:
    """Blocks next to the results: the status, the copy that is overwritten, a known workspace, and two checks."""
    working = (rows * columns * FP32_BYTES, svd_workspace_bytes(rows, columns) or 0)
    sizes = [size for size in working if size]
    return (_STATUS_BYTES, *sizes, *(-size for size in reversed(sizes)), 1, 1, -1, -1, -_STATUS_BYTES)
