"""Kernels side by side on one device: timed in turns, weighed, and held against fp64."""
