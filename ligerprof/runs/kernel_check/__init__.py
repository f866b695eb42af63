"""Check a kernel of any provider against its reference: values, gradients, strides, dtypes, compilation and bytes."""

from ligerprof.runs.kernel_check.cases import find_checked
from ligerprof.runs.kernel_check.check import CheckRow, KernelCheck, Result, check_kernel

__all__ = ["CheckRow", "KernelCheck", "Result", "check_kernel", "find_checked"]
