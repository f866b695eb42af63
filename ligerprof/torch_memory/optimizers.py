"""What torch's optimizers keep for each parameter, and what their step allocates and frees."""

from collections.abc import Mapping

from ligerprof.torch_memory.dtypes import FP32_BYTES

# states of a parameter's own size and dtype (torch/optim/adamw.py, sgd.py without momentum; deepspeed/ops/adam)
_MOMENTS: Mapping[str, int] = {"adamw-fused": 2, "adamw-foreach": 2, "deepspeed-cpu-adam": 2, "sgd": 0, "none": 0}


def moment_count(optimizer: str) -> int:
    """Optimizer states as large as the trainable weights."""
    return _MOMENTS[optimizer]


def state_sizes(optimizer: str, parameter_bytes: int) -> tuple[int, ...]:
    """Bytes of each state of a parameter on the GPU.

    Fused AdamW counts steps there, in an fp32 scalar; the others count on the host (torch/optim/adamw.py,
    _init_group).
    """
    counter = (FP32_BYTES,) if optimizer == "adamw-fused" else ()
    return (parameter_bytes,) * moment_count(optimizer) + counter


def step_copies(optimizer: str) -> int:
    """Tensors of a parameter's size and dtype that a step makes for all parameters at once.

    Foreach AdamW takes the square roots of all second moments (torch/optim/adam.py, _multi_tensor_adam).
    """
    return 1 if optimizer == "adamw-foreach" else 0
