"""The names of the kinds of figures and of their file formats, for commands that draw none."""

# the kind that is drawn from a recipe instead of sources
OF_A_RECIPE = "planes"
# in the order in which they are drawn; kinds.py has a Kind for each
KIND_NAMES = (
    "batch",
    "seq",
    "peak-batch",
    "peak-seq",
    "throughput-batch",
    "throughput-seq",
    "ablation",
    "roles",
    "accuracy",
    "memory",
    "layers",
    "kernels",
    OF_A_RECIPE,
)
FORMATS = ("png", "svg", "pdf")
