"""Search over a training command's own arguments and files; each trial is a simulated run."""
