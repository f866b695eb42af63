"""The names of the kinds of figures and of their file formats, for commands that draw none."""

# in the order in which they are drawn; kinds.py has a Kind for each
KIND_NAMES = ("batch", "seq", "peak-batch", "peak-seq", "ablation", "roles", "accuracy", "memory", "layers")
FORMATS = ("png", "svg", "pdf")
