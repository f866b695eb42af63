"""The kernels of liger-kernel, an optional package, through its own functions and its own patching."""
