"""Gated activations: SwiGLU and GeGLU, alone or with the linear layer that follows."""
