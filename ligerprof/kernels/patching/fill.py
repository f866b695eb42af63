"""Put a kernel into the modules that its slot replaces; one function per kind of slot.

A kernel runs inside the call of the module whose weight it reads, after hooks that gather the weight (ZeRO-3, FSDP).
"""

import functools
import inspect
import types
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ligerprof.errors import KernelInputError, KernelUnavailableError
from ligerprof.kernels.patching.causal_lm import FusedHead, MeasuredBudget, fused_loss_forward, loss_after_head
from ligerprof.kernels.patching.patcher import Forward, Patcher
from ligerprof.kernels.selection import Slot
from ligerprof.models.architecture import Architecture, LayerNorms, Mlp


def rms_forward(row: Architecture, kernel: Forward, add_kernel: Forward | None) -> Forward:
    """A norm's forward; with a residual, it returns the norm of the sum, and the sum."""
    offset = row.norm.offset

    def forward(self: Any, hidden_states: Tensor, residual: Tensor | None = None) -> Any:
        eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        if residual is None or add_kernel is None:
            return kernel(hidden_states, self.weight, eps, offset)
        return add_kernel(hidden_states, residual, self.weight, eps, offset)

    return forward


def layer_forward(original: Forward, row: Architecture, norms: LayerNorms) -> Forward:
    """A decoder layer's forward whose first addition is part of the norm before the MLP."""
    # without Signature.bind, because torch.compile traces this
    positional = tuple(inspect.signature(original).parameters)[2:]
    attention, mlp, scales = row.attention.name, row.mlp.name, norms.scales_sublayers

    @functools.wraps(original)
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        inputs = {**dict(zip(positional, args, strict=False)), **kwargs}
        residual = hidden_states
        # a variable for the normalized input would keep it alive until attention returns
        hidden_states, _ = getattr(self, attention)(
            hidden_states=getattr(self, norms.before_attention)(hidden_states), **inputs
        )
        for name in norms.after_attention:
            hidden_states = getattr(self, name)(hidden_states)
        if scales is not None:
            hidden_states = hidden_states * getattr(self, scales)
        hidden_states, residual = getattr(self, norms.before_mlp)(hidden_states, residual)
        hidden_states = getattr(self, mlp)(hidden_states)
        if isinstance(hidden_states, tuple):
            # with the router's scores
            hidden_states = hidden_states[0]
        for name in norms.after_mlp:
            hidden_states = getattr(self, name)(hidden_states)
        if scales is not None:
            hidden_states = hidden_states * getattr(self, scales)
        output: Tensor = residual + hidden_states
        return output

    return forward


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


_ROPE = "apply_rotary_pos_emb"
_ACTIVATIONS = {"swiglu": ("SiLU", "SiLUActivation"), "geglu": ("GELUTanh", "PytorchGELUTanh", "NewGELUActivation")}


def fill_rope(patcher: Patcher, slot: Slot, kernel: Forward) -> None:
    """Call the kernel from attention in place of `apply_rotary_pos_emb`."""
    for module in patcher.modules("Attention"):
        patcher.swap(module, slot.name, lambda original: _with_global(original, _ROPE, kernel))


def fill_rms(patcher: Patcher, slot: Slot, kernel: Forward) -> None:
    """Replace every RMSNorm, with the addition before it if the layer has one and the provider a fused variant."""
    add_kernel, layer_norms = patcher.variant(slot.with_residual_add), patcher.row.layer_norms
    forward = rms_forward(patcher.row, kernel, add_kernel)
    norms = patcher.modules("RMSNorm")
    weighted = [module for module in norms if "weight" in module._parameters]
    for module in weighted:
        patcher.swap(module, slot.name, lambda _original: forward)
    _note_left(patcher, slot, "norms have no weight", len(norms) - len(weighted), len(norms))
    if add_kernel is not None and layer_norms is not None:
        for module in patcher.modules("DecoderLayer"):
            patcher.swap(module, slot.name, lambda original: layer_forward(original, patcher.row, layer_norms))


def fill_gated(patcher: Patcher, slot: Slot, kernel: Forward) -> None:
    """Replace the activation and product of every gated MLP, and the next linear layer if the provider can.

    Raises:
        KernelUnavailableError: the model's MLP uses another activation, or cannot run in tiles that were asked for.
    """
    row, linear_kernel = patcher.row.mlp, patcher.variant(slot.with_next_linear)
    forward, mlps = gated_forward(row, kernel), patcher.modules("MLP")
    if row.sparsity_attribute is not None:
        dense = [module for module in mlps if not getattr(module, row.sparsity_attribute)]
        _note_left(patcher, slot, "MLPs have a sparse activation", len(mlps) - len(dense), len(mlps))
        mlps = dense
    for module in mlps:
        activation = None if row.activation is None else type(getattr(module, row.activation)).__name__
        # None: the code calls the function that the slot is for
        if activation is not None and activation not in _ACTIVATIONS[slot.name]:
            raise KernelUnavailableError(f"{slot.name}: the model's MLP uses {activation}. Leave {slot.name} out.")
        tile_tokens = patcher.request.mlp_tile_tokens
        if tile_tokens is not None:
            _fill_tiled(patcher, slot, module, tile_tokens)
            continue
        patcher.swap(module, slot.name, lambda _original: forward)
        # only if torch's own layers make the gates and read the product
        layers = [getattr(module, name) for name in (*row.inputs, row.down)]
        if linear_kernel is not None and all(_is_plain_linear(layer) for layer in layers):
            linear_forward = functools.partial(gated_linear_forward, kernel=linear_kernel)
            patcher.swap(layers[-1], slot.name, linear_forward)
    if linear_kernel is not None and patcher.request.mlp_tile_tokens is None:
        references = [weakref.ref(module) for module in mlps]
        patcher.patch.on_notes(functools.partial(_kept_products, slot.name, row.down, references))


def _fill_tiled(patcher: Patcher, slot: Slot, module: nn.Module, tile_tokens: int) -> None:
    row = patcher.row.mlp
    layers = [getattr(module, name) for name in (*row.inputs, row.down)]
    if not all(map(_is_plain_linear, layers)) or not can_be_tiled(row, layers):
        raise KernelUnavailableError(
            f"{slot.name}: a {type(module).__name__} is not three linear layers of torch without biases, factors and"
            " adapters, so it cannot run in tiles. Leave mlp_tile_tokens out."
        )
    forward = tiled_forward(row, slot.name, tile_tokens)
    patcher.swap(module, slot.name, lambda _original: forward)


def fill_layernorm(patcher: Patcher, slot: Slot, kernel: Forward) -> None:
    """Replace every `nn.LayerNorm`."""

    def forward(self: Any, x: torch.Tensor) -> Any:
        return kernel(x, self.weight, self.bias, self.eps)

    for module in patcher.model.modules():
        if isinstance(module, nn.LayerNorm):
            patcher.swap(module, slot.name, lambda _original: forward)


def fill_ce(patcher: Patcher, slot: Slot, kernel: Forward) -> None:
    """Compute the loss of the logits that the head returns.

    Raises:
        KernelInputError: the model has no head.
    """
    _head(patcher, slot)
    _fuse_loss(patcher, slot, loss_after_head(kernel))


def fill_flce(patcher: Patcher, slot: Slot, kernel: Forward) -> None:
    """Compute the loss within the head's call.

    Raises:
        KernelInputError: the head is neither a linear layer nor one that peft has wrapped.
    """
    measured = patcher.request.measured
    budget = None if measured is None else MeasuredBudget(measured)
    head = FusedHead(patcher.swapper, kernel, budget)
    head.fuse(_head(patcher, slot))
    _fuse_loss(patcher, slot, head.run)


def _head(patcher: Patcher, slot: Slot) -> nn.Module:
    head = patcher.model.get_output_embeddings()
    if head is None:
        raise KernelInputError(
            f"{slot.name}: {type(patcher.model).__name__} has no output layer over the vocabulary."
            f" Leave {slot.name} out."
        )
    return head  # type: ignore[no-any-return]


def _fuse_loss(patcher: Patcher, slot: Slot, run_loss: Any) -> None:
    request, model_class = patcher.request, type(patcher.model)
    patcher.swap(
        patcher.model,
        slot.name,
        lambda original: fused_loss_forward(
            original, model_class, patcher.row, run_loss, request.options, text_only=request.text_only
        ),
    )


def _note_left(patcher: Patcher, slot: Slot, problem: str, left: int, total: int) -> None:
    if left:
        patcher.patch.on_notes(lambda: f"{slot.name}: {left} of {total} {problem} and run without the kernel")


def _kept_products(slot: str, down: str, references: "list[weakref.ref[Any]]") -> str | None:
    layers = [getattr(mlp, down) for reference in references if (mlp := reference()) is not None]
    others = [layer for layer in layers if not takes_gates(layer)]
    if not others:
        return None
    names = ", ".join(sorted({f"{type(layer).__module__}.{type(layer).__qualname__}" for layer in others}))
    return f"{slot}: {len(others)} of {len(layers)} MLPs keep their product for backward, since it goes into {names}"


def _is_plain_linear(module: nn.Module) -> bool:
    """Whether its forward is torch's own, without adapters, hooks or quantization around it."""
    return type(module).forward is nn.Linear.forward and "forward" not in vars(module)


def _with_global(function: Forward, name: str, value: Any) -> Forward:
    """A copy of `function` in which the global `name` is `value`.

    Raises:
        KernelUnavailableError: the function does not use that name.
    """
    plain = function if isinstance(function, types.FunctionType) else None
    if plain is None or name not in plain.__code__.co_names:
        raise KernelUnavailableError(f"rope: {function.__qualname__} does not call {name}. Leave rope out.")
    # without __name__, by which torch.compile would look up the global in the module itself
    scope = {**plain.__globals__, name: value}
    scope.pop("__name__", None)
    copy = types.FunctionType(plain.__code__, scope, plain.__name__, plain.__defaults__, plain.__closure__)
    copy.__kwdefaults__ = plain.__kwdefaults__
    return functools.wraps(plain)(copy)
