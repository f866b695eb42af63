"""What a kernel declares about itself, without torch: its function, its memory, and where it applies and runs."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from ligerprof.errors import KernelUnavailableError
from ligerprof.kernels.device import triton_unavailable_reason
from ligerprof.kernels.selection import applies
from ligerprof.models import ModelSpec
from ligerprof.text import error_line


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelShape:
    """The sizes of one call of a kernel.

    Attributes:
        sequences: sequences in the micro-batch, which `tokens` counts over.
        activation_bytes: bytes per element of the activations (2 or 4).
        parameter_bytes: bytes per element of the weights.
        compute_bytes: bytes per element of matrix products if autocast casts for them; None: `activation_bytes`.
        weight_requires_grad: whether the kernel's weight requires a gradient.
        sm_count: multiprocessors of the GPU, which determine the number of some partial sums.
        flce_budget: `lean`, `balanced`, or bytes of workspace, for the fused loss.
        input_requires_grad: whether the hidden states of the fused loss require a gradient.
        low_rank: rank of the factors that adapters add to the head, 0 without any.
        factor_bytes: bytes per element of these factors.
        loss_returns: names of results that a loss returns besides a reduced loss (`LossOutputs`).
    """

    tokens: int
    sequences: int
    hidden: int
    intermediate: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    activation_bytes: int
    parameter_bytes: int
    compute_bytes: int | None = None
    weight_requires_grad: bool = True
    sm_count: int = 132
    flce_budget: str | int = "balanced"
    input_requires_grad: bool = True
    low_rank: int = 0
    factor_bytes: int = 4
    loss_returns: tuple[str, ...] = ()

    @property
    def product_bytes(self) -> int:
        """Bytes per element of a matrix product's operands and result."""
        return self.activation_bytes if self.compute_bytes is None else self.compute_bytes

    @property
    def head_gradient_bytes(self) -> int:
        """The gradient of the head's weight; 0 if it does not require one."""
        return self.vocab * self.hidden * self.parameter_bytes if self.weight_requires_grad else 0

    @property
    def head_cast_bytes(self) -> int:
        """Copies in the products' dtype of the hidden states, the head's weight and the adapters' factors."""
        rows = self.tokens if self.activation_bytes != self.product_bytes else 0
        rows += self.vocab if self.parameter_bytes != self.product_bytes else 0
        factors = self.tokens + self.vocab if self.factor_bytes != self.product_bytes else 0
        return (rows * self.hidden + factors * self.low_rank) * self.product_bytes

    @property
    def factor_gradient_bytes(self) -> int:
        """The gradients of both factors, that of the tokens' in the products' dtype."""
        return self.low_rank * (self.tokens * self.product_bytes + self.vocab * self.factor_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelMemory:
    """Bytes that one call allocates, in the order of allocation.

    Attributes:
        kept_inputs: names of the inputs that autograd keeps for backward. Their bytes are not counted here: the
            operation that made them allocated them.
        keeps_output: whether backward needs the output.
        output_bytes: new memory of the output; 0 if the operation runs in place.
        saved_bytes: allocated and kept until backward, output excluded.
        forward_temporary_bytes: peak of what forward allocates and frees, beyond output and saved bytes.
        workspace_bytes: the largest block of these, if there are others (0: they are one block).
        forward_gradient_bytes: gradients computed in forward (the fused losses).
        backward_gradient_bytes: new memory for the gradients that backward returns.
        backward_temporary_bytes: peak of what backward allocates and frees.

    Raises:
        TypeError: a number of bytes is not an integer, or `kept_inputs` is not a tuple.
        ValueError: a number of bytes is negative.
    """

    kept_inputs: tuple[str, ...] = ()
    keeps_output: bool = False
    output_bytes: int = 0
    saved_bytes: int = 0
    forward_temporary_bytes: int = 0
    workspace_bytes: int = 0
    forward_gradient_bytes: int = 0
    backward_gradient_bytes: int = 0
    backward_temporary_bytes: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.kept_inputs, tuple):
            raise TypeError(f"kept_inputs is {self.kept_inputs!r}. It must be a tuple of names.")
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name.endswith("_bytes") and not isinstance(value, int):
                raise TypeError(f"{item.name} is {value!r}. It must be an integer.")
            if item.name.endswith("_bytes") and value < 0:
                raise ValueError(f"{item.name} is {value}. It must not be negative.")


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSpec:
    """One kernel of one provider.

    Attributes:
        name: the word in `--liger`, or the name of a fused variant (kernels/selection.py).
        title: one line for `ligerprof kernels`.
        entry: `module:function`, as a patched model calls it: it may overwrite activations that the model makes for
            this call only.
        reference: `module:function` of the plain-torch function with the same signature.
        slot: name of the slot that the kernel fills: rope, rms, swiglu, geglu, layernorm, ce or flce.
        memory: bytes of one call; None for plain torch, which the estimate counts operation by operation.
        applies: returns why an architecture has no such operation, or None.
        unavailable_reason: returns why it cannot run on a kind of device (`cuda`, `cpu`, `simulated`), or None.
        leaves: returns the names of a model's modules that its provider does not patch, though they have the operation.
        fuses_experts: returns whether its provider replaces all experts of a model by one function.
    """

    name: str
    provider: str
    title: str
    entry: str
    reference: str
    slot: str
    memory: Callable[[KernelShape], KernelMemory] | None
    applies: Callable[[ModelSpec], str | None]
    unavailable_reason: Callable[[str], str | None]
    leaves: Callable[[ModelSpec], tuple[str, ...]] = lambda _spec: ()
    fuses_experts: Callable[[ModelSpec], bool] = lambda _spec: False


def triton_kernel(
    slot: str, title: str, function: str, memory: Callable[[KernelShape], KernelMemory], *, name: str | None = None
) -> KernelSpec:
    """The spec of our Triton kernel for a slot.

    Args:
        function: `folder:function`, in the folder's modules `triton` and `reference`.
        name: the kernel's name, if it is a fused variant.
    """
    folder, _, attribute = function.partition(":")
    return KernelSpec(
        name=name or slot,
        provider="ligerprof",
        title=title,
        entry=f"ligerprof.kernels.{folder}.triton:{attribute}",
        reference=f"ligerprof.kernels.{folder}.reference:{attribute}",
        slot=slot,
        memory=memory,
        applies=applies(slot),
        unavailable_reason=triton_unavailable_reason,
    )


def plain_torch(kernel: KernelSpec, title: str) -> KernelSpec:
    """The spec of a kernel's reference, which runs on every device."""
    return replace(
        kernel,
        provider="torch",
        title=title,
        entry=kernel.reference,
        memory=None,
        unavailable_reason=lambda _device_kind: None,
    )


def load_entry(entry: str) -> Callable[..., Any]:
    """Import the function that `module:function` names.

    Raises:
        KernelUnavailableError: it cannot be imported.
    """
    module, _, name = entry.partition(":")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except Exception as error:  # the module may be a plug-in's, and fail in any way
        raise KernelUnavailableError(f"{entry} cannot be imported: {error_line(error)}") from error
    return function
