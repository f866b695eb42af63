"""A decoder layer: its tape of tensor operators, with adapters, quantized weights and kernels put in where they go."""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from ligerprof.analyzers.estimate.activations import activate
from ligerprof.analyzers.estimate.attention import attend
from ligerprof.analyzers.estimate.context import Context, is_eager
from ligerprof.analyzers.estimate.dora import add_dora
from ligerprof.analyzers.estimate.experts import fused_experts, routed_tokens
from ligerprof.analyzers.estimate.fused import add_and_norm, adds_in_norm, gated_linear, takes_gates
from ligerprof.analyzers.estimate.kernel_call import call_kernel, kernel_memory
from ligerprof.analyzers.estimate.lora import add_adapter, add_adapter_to_quantized
from ligerprof.analyzers.estimate.norms import bare_norm, norm
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.operations import (
    dropout,
    linear,
    linear_4bit,
    linear_8bit,
    multiply,
    renamed,
    scale,
    turned,
)
from ligerprof.analyzers.estimate.operators import Replay
from ligerprof.analyzers.estimate.rotary import rotate_both
from ligerprof.analyzers.estimate.scaled_dot_product import attention_problem
from ligerprof.analyzers.estimate.tensors import Tensor, Value
from ligerprof.kernels.selection import find_slot
from ligerprof.models.architecture import Feature
from ligerprof.models.layer_tape import Batch, Step, experts_tape, layer_tape, sizes_of, unrolled
from ligerprof.roles import Role
from ligerprof.torch_memory.attention import AttentionKernel, choose_kernel
from ligerprof.torch_memory.dtypes import FP32_BYTES


def run_layer(context: Context, value: Value, index: int, output_role: Role) -> list[Value]:
    """Run one decoder layer on the residual stream `value`, which the caller still holds.

    Returns:
        The residual stream, and attention's probabilities if the layer returns them.
    """
    recipe, spec = context.recipe, context.spec
    wide = (context.half_bytes or context.stream_bytes) == FP32_BYTES
    tape = layer_tape(spec, index, Batch(rows=recipe.rows, tokens=recipe.row_tokens, wide=wide))
    chunks = sizes_of(spec, index, recipe.rows, recipe.row_tokens).get("chunks", 1)
    name = f"{spec.architecture.layers}.{index}"
    return _LayerReplay(context, value, name, output_role=output_role).outputs(list(unrolled(tape, chunks)))


class _LayerReplay(Replay):
    """Runs the steps of a layer's tape, with what the recipe puts in place of some."""

    def __init__(
        self,
        context: Context,
        value: Value,
        name: str,
        *,
        others: Sequence[Value] = (),
        output_role: Role = Role.ACTIVATIONS,
    ) -> None:
        super().__init__(context, value, name, others=others, output_role=output_role)
        # norms that a kernel has computed with the addition before them
        self._normed: dict[int, Value] = {}

    def replaced(
        self, step: Step, values: Sequence[Any], following: Iterable[Step]
    ) -> tuple[Sequence[Tensor | None], int]:
        """What a kernel makes in place of a step, and of how many of the next ones."""
        kind, results, _, *details = step
        if kind in ("gated", "rotate", "mixture"):
            made = self._in_place_of(kind, values, islice(following, details[-1]), *details[:-1])
            return made, details[-1] if made else 0
        if kind == "add" and (after := self._norm_after(following, results)) is not None:
            return self._add_and_norm(values, after), 0
        if kind == "norm" and results in self._normed:
            return [self._normed.pop(results)], 0
        return (), 0

    def make_gated(self, *_given: object) -> tuple[()]:
        """Nothing by itself: the steps that follow make it."""
        return ()

    make_rotate = make_mixture = make_gated

    def make_norm(self, value: Value, path: str) -> Value:
        """A norm with a weight."""
        return norm(self.context, value, f"{self.name}.{path}")

    def make_bare_norm(self, value: Value, _path: str) -> Value:
        """A norm of heads without a weight."""
        return bare_norm(self.context, value)

    def make_activate(self, value: Value, _path: str) -> Value:
        """The function that the config names."""
        return activate(self.context, value, self.context.spec.activation)

    def make_attend(self, query: Value, key: Value, value: Value, apart: bool) -> tuple[Value, Value | None]:
        """Attention, and the probabilities where it returns them."""
        return attend(self.context, query, key, value, apart=_has_heads_apart(self.context, recorded=apart))

    def make_linear(self, value: Value, path: str) -> Value:
        """A linear layer."""
        return project(self.context, value, f"{self.name}.{path}")

    def make_heads(self, value: Value, kind: str) -> Value:
        """A view with a dimension for heads, whose gradient is copied if it comes with the heads apart."""
        return turned(self.context, value) if _comes_by_heads(self.context, value, kind) else self.tape.name(value)

    def _in_place_of(
        self, kind: str, values: Sequence[Any], steps: Iterable[Step], path: str = "", *shared: bool
    ) -> Sequence[Value]:
        """What a kernel makes in place of the steps that follow, or experts that run in turn; else nothing."""
        context = self.context
        if kind == "mixture":
            return self._mix(f"{self.name}.{path}", *values, *shared)
        if kind == "rotate":
            if find_slot(Feature.ROTARY).name not in context.kernels:
                return ()
            return rotate_both(context, *values, wide_tables=any("wide" in step[2] for step in steps if len(step) > 2))
        gate = context.spec.architecture.mlp.gate
        slot = "" if gate is None else find_slot(gate).name
        name = f"{self.name}.{path}"
        row = context.spec.architecture.mlp
        if not context.replaces(slot, name) and not takes_gates(context, f"{name}.{row.down}"):
            return ()
        output = _gated_mlp(context, values[0], name, slot)
        return [renamed(context, output, dropout(context, output, context.spec.dropout_rate(row.dropout)))]

    def _mix(self, name: str, tokens: Value, choices: Value, scores: Value, shared: bool) -> Sequence[Value]:
        """What experts make that a kernel fuses or that run in turn; nothing where they run as grouped products.

        Args:
            shared: whether another module reads the same view of the tokens.
        """
        context, tape = self.context, self.tape
        if any(kernel.fuses_experts(context.spec) for kernel in context.kernels.values()):
            return [fused_experts(context, tokens, scores, name)]
        if not context.recipe.runs_experts_in_turn:
            return ()
        routed = routed_tokens(context)
        for weight_name, weight in context.weights.items():
            if weight_name.startswith(f"{name}."):
                weight.uses = len(routed)
        # gradients of experts add up in a view of the tokens, before those of a shared expert or the residual join them
        view = Operation(elements=tokens.elements, width=tokens.width, passes=(tokens,), view_of=tokens)
        read = tape.name(tokens) if shared else tape.run(view)
        experts = _LayerReplay(context, read, name, others=(choices, scores))
        return [renamed(context, read, experts.run(experts_tape(context.spec.model_type, routed)))]

    def _norm_after(self, following: Iterable[Step], added: int) -> tuple[int, str] | None:
        """Number and path of the norm that a kernel computes with an addition."""
        norms = self.context.spec.architecture.layer_norms
        if norms is None or not adds_in_norm(self.context):
            return None
        kind, results, *rest = next(step for step in following if step[0] != "drop")
        is_ours = kind == "norm" and rest == [[added], norms.before_mlp]
        return (results, rest[1]) if is_ours else None

    def _add_and_norm(self, values: Sequence[Any], norm_after: tuple[int, str]) -> Sequence[Value]:
        residual, added = values
        number, path = norm_after
        # the kernel drops what it adds, and so does the tape
        self.tape.name(added)
        middle, normed = add_and_norm(self.context, residual, added, f"{self.name}.{path}")
        self._normed[number] = normed
        return [middle]


def project(context: Context, value: Value, name: str) -> Value:
    """A linear layer of the model, with its bias and its adapter, if any."""
    weight, bias = context.weights[f"{name}.weight"], context.weights.get(f"{name}.bias")
    is_packed, is_adapted = bool(weight.packed_sizes), f"{name}.lora_A" in context.weights
    multiply_by = {None: linear, 4: linear_4bit, 8: linear_8bit}[context.recipe.packed_bits if is_packed else None]
    result = multiply_by(context, value, weight, bias)
    if not is_adapted:
        return result
    if context.recipe.dora:
        return add_dora(context, value, result, name)
    return (add_adapter_to_quantized if is_packed else add_adapter)(context, value, result, name)


def _comes_by_heads(context: Context, value: Value, kind: str) -> bool:
    """Whether the gradient of query, key or value comes with its heads apart.

    Eager attention and scaled_dot_product_attention's math kernel compute it so. Rotated parts and equal parts of heads
    are slices, whose gradients begin as zeros with the heads apart, or are joined so. Norms of heads pass it on as it
    is.
    """
    if value.elements <= context.tokens * context.spec.head_dim:
        return False
    rotated = kind == "rotated" and context.rotates
    if rotated and find_slot(Feature.ROTARY).name in context.kernels:
        return False
    return rotated or kind == "split" or _multiplies_by_heads(context)


def _has_heads_apart(context: Context, *, recorded: bool) -> bool:
    """Whether attention receives query and key with their heads apart, as plain torch lays them out or kernels do.

    A kernel that norms heads that lie apart writes what it reads as rows; one that rotates keeps the layout.
    """
    row, slot = context.spec.architecture.attention, find_slot(Feature.RMS_NORM).name
    if row.norms_apart and row.qk_norms is not None and context.is_fused(slot, row.qk_norms[0]):
        return True
    return recorded and not (context.rotates and find_slot(Feature.ROTARY).name in context.kernels)


def _multiplies_by_heads(context: Context) -> bool:
    """Whether attention is separate products of matrices, one for each head."""
    recipe = context.recipe
    if is_eager(recipe):
        return True
    return choose_kernel(attention_problem(recipe, context.layer), recipe.gpu_spec) is AttentionKernel.MATH


def _gated_mlp(context: Context, value: Value, name: str, slot: str) -> Value:
    """`down_proj(act(gate_proj(x)) * up_proj(x))` by kernels."""
    tape, row = context.tape, context.spec.architecture.mlp
    down = f"{name}.{row.down}"
    if takes_gates(context, down):
        gate, up, *joint = _gate_and_up(context, value, name)
        output = gated_linear(context, gate, up, down)
        # as below
        tape.release(up, gate, *joint)
        return _scaled_output(context, output)
    gate, up, *joint = _gate_and_up(context, value, name)
    product = gated_product(context, gate, up, slot)
    # Python frees a tuple's items from the last one on
    tape.release(up, gate, *joint)
    output = _scaled_output(context, project(context, product, down))
    tape.release(product)
    return output


def _scaled_output(context: Context, output: Value) -> Value:
    """The output of a gated MLP times the number that the architecture may have for it."""
    scales = context.spec.architecture.mlp.multipliers is not None
    return renamed(context, output, scale(context, output)) if scales else output


def _gate_and_up(context: Context, value: Value, name: str) -> tuple[Value, ...]:
    """Gate and up, and the joint tensor if one projection computes both."""
    row = context.spec.architecture.mlp
    if row.multipliers is not None:
        gate = project(context, value, f"{name}.{row.inputs[0]}")
        gate = renamed(context, gate, scale(context, gate))
        return gate, project(context, value, f"{name}.{row.inputs[1]}")
    projected = tuple(project(context, value, f"{name}.{item}") for item in row.inputs)
    return projected if len(projected) > 1 else (*context.tape.split(projected[0], 2), projected[0])


def gated_product(context: Context, gate: Value, up: Value, slot: str) -> Value:
    """`act(gate) * up` by the kernel in the slot, fused or plain torch."""
    if context.is_fused(slot):
        memory = kernel_memory(context, slot, gate)
        return call_kernel(context, memory, {"gate": gate, "up": up}, elements=gate.elements, width=gate.width)
    activated = activate(context, gate, context.spec.activation)
    product = multiply(context, activated, up)
    context.tape.release(activated)
    return product
