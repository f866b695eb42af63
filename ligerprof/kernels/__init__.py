"""Fused kernels, pluggable."""
