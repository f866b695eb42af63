"""One training step, on the GPU or simulated, and the directory it leaves."""
