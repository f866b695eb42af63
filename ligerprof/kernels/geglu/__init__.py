"""GeGLU: GELU (tanh) of the gate times the up projection."""
