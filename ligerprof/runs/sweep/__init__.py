"""Sweeps: grids of training steps, each in its own process; a killed sweep continues where it stopped."""
