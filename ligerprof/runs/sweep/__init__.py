"""A grid of training steps, each in a process of its own, in a folder that a killed sweep goes on from."""
