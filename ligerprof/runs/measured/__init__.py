"""Training steps measured on CUDA devices."""
