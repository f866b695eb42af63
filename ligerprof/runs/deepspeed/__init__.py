"""The engine deepspeed: one process or several ranks, ZeRO 0 to 3, with offload to main memory or a disk."""

from ligerprof.runs.deepspeed.measure import follow_step, measure_deepspeed_step

__all__ = ["follow_step", "measure_deepspeed_step"]
