"""The memory of the GeGLU kernel."""

from ligerprof.kernels.gated.spec import gated_specs

SPECS = gated_specs("geglu", "GeGLU")
