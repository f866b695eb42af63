"""Predict how long a training step takes: its work, and the rates of a GPU and its host."""
