"""GeGLU: gelu(gate) * up in the tanh form, alone or with the linear layer behind it."""

from torch import Tensor

from ligerprof.kernels.gated.triton import gated, gated_linear


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up in the tanh form, of any shape.

    Raises:
        KernelInputError: gate and up differ in shape or dtype.
    """
    return gated(gate, up, "geglu")


def geglu_linear(
    gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None = None, *, overwrite: bool = False
) -> Tensor:
    """The linear layer's output on geglu(gate, up), which backward makes anew.

    Args:
        overwrite: whether backward may write over gate and up.

    Raises:
        KernelInputError: shapes or dtypes that do not go together.
    """
    return gated_linear(gate, up, weight, bias, "geglu", overwrite=overwrite)
