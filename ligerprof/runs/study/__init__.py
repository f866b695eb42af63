"""A study: a grid of training steps with a report."""
