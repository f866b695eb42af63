"""The training step without a GPU: real model code on fake tensors, and a model of the caching allocator."""

from ligerprof.snapshots.collector import collector_paused

# torch and transformers create so many objects that the collector's walks take a fifth of their import
with collector_paused():
    from ligerprof.runs.simulated.driver import simulate_step

__all__ = ["simulate_step"]
