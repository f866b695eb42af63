"""What the kernels of gated activations share."""
