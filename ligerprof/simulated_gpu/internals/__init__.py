"""Memory that CUDA's implementations of operators allocate and that no dispatch mode sees.

Each entry of INTERNALS runs an operator with the temporaries of its CUDA kernel; their sizes come from torch_memory.
"""

from ligerprof.simulated_gpu.internals.attention import ATTENTION_INTERNALS
from ligerprof.simulated_gpu.internals.call import Call
from ligerprof.simulated_gpu.internals.operators import OPERATOR_INTERNALS
from ligerprof.simulated_gpu.internals.products import PRODUCT_INTERNALS
from ligerprof.simulated_gpu.internals.reductions import REDUCTION_INTERNALS

INTERNALS = {**ATTENTION_INTERNALS, **OPERATOR_INTERNALS, **PRODUCT_INTERNALS, **REDUCTION_INTERNALS}

__all__ = ["INTERNALS", "Call"]
