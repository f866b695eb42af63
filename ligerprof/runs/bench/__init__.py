"""Benchmarks of kernels on one device: time, memory, and errors against fp64."""
