"""Kernels: outputs, gradients and bytes, in the interpreter and compiled."""
