"""Activation offloading as TRL and torchtune do it: saved tensors are in main memory between the passes.

trl/models/activation_offloading.py of July 2026, OffloadActivations and get_act_offloading_ctx_manager, which has its
origin in torchtune. A tensor that autograd saves is copied to page-locked memory on another stream, unless it is small,
a parameter, or shares its storage with one that is still being copied. The newest copies keep their originals for a
while. The output head keeps what it saves.
"""

# smaller tensors stay on the GPU
SMALLEST_BYTES = 1024
# the original of tensor n is released when tensor n + 5 is copied
STASH_LENGTH = 5
