"""The training step without a GPU: real model code on fake tensors, and a model of the caching allocator."""

from ligerprof.runs.simulated.driver import simulate_step

__all__ = ["simulate_step"]
