"""Memory analysis and profiling for LLM training, with pluggable kernels."""

__version__ = "0.1.0"
