"""A simulated GPU: torch runs unchanged, with CUDA tensors that have sizes and addresses but no memory."""
