"""The workspaces of cuBLAS and cuBLASLt, which a thread allocates at its first product and never frees."""

from ligerprof.gpus import GpuSpec
from ligerprof.units import MIB

# parseCUDABlasLtWorkspaceSize (aten/src/ATen/cuda/CUDABlas.cpp): 1024 KiB unless CUBLASLT_WORKSPACE_SIZE is set;
# measured on one H200 with torch 2.11
LT_WORKSPACE_BYTES = MIB


def thread_workspace_bytes(gpu: GpuSpec, *, adds_bias: bool) -> int:
    """What one thread keeps: a product that adds a bias vector goes through cuBLASLt (getCUDABlasLtWorkspace)."""
    return gpu.cublas_workspace_bytes + (LT_WORKSPACE_BYTES if adds_bias else 0)
