"""The engine deepspeed: one process or several ranks, ZeRO 0 to 3, with offload to main memory or a disk."""

from ligerprof.runs.deepspeed.measure import measure_deepspeed_step

__all__ = ["measure_deepspeed_step"]
