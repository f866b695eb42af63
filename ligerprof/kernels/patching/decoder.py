"""A decoder's forwards with kernels in them: norms, gated MLPs, the layer around them; once for every architecture.

A kernel runs inside the call of the module whose weight it reads, so hooks that gather it (ZeRO-3, FSDP) have fired.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ligerprof.kernels.patching.plans import LayerPlan, PatchPlan

Forward = Callable[..., Any]


def rms_forward(plan: PatchPlan, kernel: Forward, add_kernel: Forward | None) -> Forward:
    """A norm's forward; handed a residual, it returns the norm of the sum, and the sum."""
    eps, offset = plan.rms_eps, plan.rms_offset

    def forward(self: Any, hidden_states: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None or add_kernel is None:
            return kernel(hidden_states, self.weight, getattr(self, eps), offset)
        return add_kernel(hidden_states, residual, self.weight, getattr(self, eps), offset)

    return forward


def layer_forward(original: Forward, plan: LayerPlan) -> Forward:
    """A decoder layer's forward whose first addition is part of the norm behind it."""
    # by hand and not by Signature.bind: this runs for every layer, and torch.compile traces it
    positional = tuple(inspect.signature(original).parameters)[2:]

    @functools.wraps(original)
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        inputs = {**dict(zip(positional, args, strict=False)), **kwargs}
        residual = hidden_states
        hidden_states, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **inputs)
        if plan.attention_norm is not None:
            hidden_states = getattr(self, plan.attention_norm)(hidden_states)
        hidden_states, residual = getattr(self, plan.middle_norm)(hidden_states, residual)
        hidden_states = self.mlp(hidden_states)
        if plan.mlp_norm is not None:
            hidden_states = getattr(self, plan.mlp_norm)(hidden_states)
        output: Tensor = residual + hidden_states
        return output

    return forward


def gated_forward(kernel: Forward) -> Forward:
    """A gated MLP's forward; the product is left to the last linear layer where that takes gates."""

    def forward(self: Any, x: Tensor) -> Any:
        # in no variables, which would hold gate and up for as long as the last layer runs
        if takes_gates(self.down_proj):
            return self.down_proj(self.gate_proj(x), self.up_proj(x))
        return self.down_proj(kernel(self.gate_proj(x), self.up_proj(x)))

    return forward


def gated_linear_forward(original: Forward, kernel: Forward) -> Forward:
    """A linear layer's forward that multiplies the gates itself where it is handed two."""

    @functools.wraps(original)
    def forward(self: Any, gate: Tensor, up: Tensor | None = None) -> Any:
        if up is None:
            return original(self, gate)
        # the MLP made both for this call alone
        return kernel(gate, up, self.weight, self.bias, overwrite=True)

    forward.takes_gates = True  # type: ignore[attr-defined]
    return forward


def takes_gates(module: Any) -> bool:
    """Whether a linear layer multiplies gates itself: one that an adapter was put around later does not."""
    return getattr(type(module).forward, "takes_gates", False)
