"""What a kernel tells the rest of the product about itself, without torch."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ligerprof.models import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelShape:
    """The sizes one call of a kernel sees.

    Attributes:
        sequences: sequences in the micro-batch; `tokens` = sequences * tokens a sequence.
        activation_bytes: bytes an element of the activations the kernel is given (2 or 4).
        parameter_bytes: bytes an element of the weights it is given.
        compute_bytes: bytes an element of what matrix products work on, where autocast casts for them;
            None is `activation_bytes`.
        weight_requires_grad: whether the weight that the kernel reads requires a gradient.
        sm_count: multiprocessors of the GPU; some partial sums are sized by it.
        flce_budget: `lean`, `balanced`, or bytes of workspace, for the fused loss.
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

    @property
    def product_bytes(self) -> int:
        """Bytes an element of a matrix product's operands and result."""
        return self.activation_bytes if self.compute_bytes is None else self.compute_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelMemory:
    """Bytes one call takes, in the order of its life.

    Attributes:
        kept_inputs: names of the op's own inputs that autograd keeps for backward (they belong
            to whoever made them: the estimator counts each of them once).
        keeps_output: whether the op's output is kept for the op's own backward.
        output_bytes: what the op returns, new memory only (0 where it writes in place).
        saved_bytes: what the op allocates and keeps until its backward, output excluded.
        forward_temporary_bytes: peak of what it allocates and drops again in forward, beyond
            output and saved bytes.
        forward_gradient_bytes: gradients it makes in the forward pass (the fused losses).
        backward_gradient_bytes: new memory for the gradients it returns from backward.
        backward_temporary_bytes: peak of what it allocates and drops again in backward.
    """

    kept_inputs: tuple[str, ...] = ()
    keeps_output: bool = False
    output_bytes: int = 0
    saved_bytes: int = 0
    forward_temporary_bytes: int = 0
    forward_gradient_bytes: int = 0
    backward_gradient_bytes: int = 0
    backward_temporary_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSpec:
    """One kernel of one provider.

    Attributes:
        name: the word in `--liger`, or the name of a fused variant (kernels/slots.py).
        provider: whose it is.
        title: one line for `ligerprof kernels`.
        entry: `module:function`, the callable that takes and returns tensors, as a patched model calls it: it may write
            over activations that the model makes for this call alone.
        reference: `module:function` of the plain-torch function with the same signature.
        slot: name of the slot it fills (kernels/slots.py): rope, rms, swiglu, geglu, layernorm, ce or flce.
        memory: bytes of one call; None for plain torch, which the estimate counts operation by operation.
        applies: why the architecture has no such operation, or None.
        unavailable_reason: why it cannot run on a device of this type (`cuda`, `cpu`, `simulated`), or None.
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


def load_entry(entry: str) -> Callable[..., Any]:
    """Import the function that `module:function` names."""
    module, _, name = entry.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function
