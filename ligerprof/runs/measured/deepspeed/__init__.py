"""The engine deepspeed: one process or several ranks, ZeRO 0 to 3, with offload to main memory or a disk."""
