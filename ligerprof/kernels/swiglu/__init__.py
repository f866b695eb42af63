"""SwiGLU: SiLU of the gate times the up projection."""
