"""Forwards of norms, gated MLPs and decoder layers with kernels in them, for every architecture.

A kernel runs inside the call of the module whose weight it reads, after hooks that gather the weight (ZeRO-3, FSDP).
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional

from ligerprof.models.architecture import Architecture, Mlp

Forward = Callable[..., Any]


def rms_forward(row: Architecture, kernel: Forward, add_kernel: Forward | None) -> Forward:
    """A norm's forward; with a residual, it returns the norm of the sum, and the sum."""
    eps, offset = row.norm.eps, row.norm.offset

    def forward(self: Any, hidden_states: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None or add_kernel is None:
            return kernel(hidden_states, self.weight, getattr(self, eps), offset)
        return add_kernel(hidden_states, residual, self.weight, getattr(self, eps), offset)

    return forward


def layer_forward(original: Forward, row: Architecture) -> Forward:
    """A decoder layer's forward whose first addition is part of the norm before the MLP."""
    # without Signature.bind, because torch.compile traces this
    positional = tuple(inspect.signature(original).parameters)[2:]
    norms, attention, mlp = row.layer_norms, row.attention.name, row.mlp.name
    assert norms.before_attention is not None
    assert norms.before_mlp is not None
    before_attention, before_mlp, drops = norms.before_attention, norms.before_mlp, row.residual_dropout
    after_attention = _named(norms.after_attention, drops.after_attention if drops else None)
    after_mlp = _named(norms.after_mlp, drops.after_mlp if drops else None)
    scales = norms.scales_sublayers

    @functools.wraps(original)
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        inputs = {**dict(zip(positional, args, strict=False)), **kwargs}
        residual = hidden_states
        # a variable for the normalized input would keep it alive until attention returns
        hidden_states, _ = getattr(self, attention)(
            hidden_states=getattr(self, before_attention)(hidden_states), **inputs
        )
        for name in after_attention:
            hidden_states = getattr(self, name)(hidden_states)
        if scales is not None:
            hidden_states = hidden_states * getattr(self, scales)
        hidden_states, residual = getattr(self, before_mlp)(hidden_states, residual)
        hidden_states = getattr(self, mlp)(hidden_states)
        if isinstance(hidden_states, tuple):
            # with the router's scores
            hidden_states = hidden_states[0]
        for name in after_mlp:
            hidden_states = getattr(self, name)(hidden_states)
        if scales is not None:
            hidden_states = hidden_states * getattr(self, scales)
        output: Tensor = residual + hidden_states
        return output

    return forward


def _named(*names: str | None) -> tuple[str, ...]:
    return tuple(name for name in names if name is not None)


def gated_forward(row: Mlp, kernel: Forward) -> Forward:
    """A gated MLP's forward; the last linear layer computes the product if it takes gates."""
    names = row.inputs
    gate_factor, output_factor = row.multipliers or (None, None)

    def gates(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        if len(names) == 1:
            return getattr(self, names[0])(x).chunk(2, dim=-1)  # type: ignore[no-any-return]
        if gate_factor is not None:
            return getattr(self, names[0])(x) * getattr(self, gate_factor), getattr(self, names[1])(x)
        return getattr(self, names[0])(x), getattr(self, names[1])(x)

    def forward(self: Any, x: Tensor) -> Any:
        down = getattr(self, row.down)
        # variables would keep gate and up alive until the last layer returns
        output = down(*gates(self, x)) if takes_gates(down) else down(kernel(*gates(self, x)))
        if output_factor is not None:
            output = output * getattr(self, output_factor)
        if row.dropout_attribute is None:
            return output
        return functional.dropout(output, p=getattr(self, row.dropout_attribute), training=self.training)

    return forward


def tiled_forward(row: Mlp, activation: str, tile_tokens: int) -> Forward:
    """A gated MLP's forward that computes a tile of tokens at a time; see `can_be_tiled`."""
    # loads Triton
    from ligerprof.kernels.gated.tiled import tiled_gated_mlp

    def forward(self: Any, x: Tensor) -> Any:
        gate, up, down = (getattr(self, name).weight for name in (*row.inputs, row.down))
        return tiled_gated_mlp(x, gate, up, down, activation, tile_tokens=tile_tokens)

    return forward


def can_be_tiled(row: Mlp, layers: Sequence[Any]) -> bool:
    """Whether an MLP is two projections, their gated product and a last one, without biases, factors and dropout."""
    is_plain = len(row.inputs) == 2 and row.multipliers is None and row.dropout_attribute is None
    return is_plain and all(layer.bias is None for layer in layers)


def gated_linear_forward(original: Forward, kernel: Forward) -> Forward:
    """A linear layer's forward that computes the gated product if it receives gate and up."""

    @functools.wraps(original)
    def forward(self: Any, gate: Tensor, up: Tensor | None = None) -> Any:
        if up is None:
            return original(self, gate)
        # the MLP allocated both for this call only
        return kernel(gate, up, self.weight, self.bias, overwrite=True)

    forward.takes_gates = True  # type: ignore[attr-defined]
    return forward


def takes_gates(module: Any) -> bool:
    """Whether a linear layer computes the gated product; not if an adapter has wrapped it since."""
    return getattr(type(module).forward, "takes_gates", False)
