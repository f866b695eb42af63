"""The memory of the SwiGLU kernel."""

from ligerprof.kernels.gated.spec import gated_specs

SPECS = gated_specs("swiglu", "SwiGLU")
