"""Training under DeepSpeed: one process or several ranks, ZeRO 0 to 3, offload to main memory or disk."""
