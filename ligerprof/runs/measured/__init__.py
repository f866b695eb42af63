"""One training step on a CUDA device."""
