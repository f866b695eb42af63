"""scaled_dot_product_attention on CUDA: which kernel runs, what it allocates, and what math attention computes."""
