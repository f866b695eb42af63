"""What the GeGLU kernel and its plain-torch twin cost."""

from ligerprof.kernels.gated.spec import gated_specs

SPECS = gated_specs("geglu", "GeGLU")
