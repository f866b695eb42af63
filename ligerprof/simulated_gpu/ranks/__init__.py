"""Ranks of a larger world on simulated GPUs: their processes, their process groups, and what they tell each other."""
