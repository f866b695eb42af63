"""Kernels of other packages behind the signatures of ours."""
