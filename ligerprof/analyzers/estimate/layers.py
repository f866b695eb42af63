"""A decoder layer: its tape of tensor operators, with adapters, quantized weights and kernels put in where they go."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ligerprof.analyzers.estimate.activations import activate
from ligerprof.analyzers.estimate.attention import attend
from ligerprof.analyzers.estimate.context import Context, is_eager
from ligerprof.analyzers.estimate.delta_net import delta_net, short_conv
from ligerprof.analyzers.estimate.dora import add_dora
from ligerprof.analyzers.estimate.expert_batches import add_routed, run_all_experts
from ligerprof.analyzers.estimate.experts import add_shared_expert, run_experts
from ligerprof.analyzers.estimate.fused import add_and_norm, adds_in_norm, gated_linear, takes_gates
from ligerprof.analyzers.estimate.kernel_call import call_kernel, kernel_memory
from ligerprof.analyzers.estimate.lora import add_adapter, add_adapter_to_quantized
from ligerprof.analyzers.estimate.norms import bare_rms_norm, norm
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.operations import (
    add,
    dropout,
    in_order,
    linear,
    linear_4bit,
    linear_8bit,
    multiply,
    renamed,
    scale,
    unary,
)
from ligerprof.analyzers.estimate.rotary import rotate_both
from ligerprof.analyzers.estimate.scaled_dot_product import as_heads
from ligerprof.analyzers.estimate.state_space import mix_states
from ligerprof.analyzers.estimate.tensors import Tensor, Value
from ligerprof.kernels.slots import find_slot
from ligerprof.models.architecture import Feature
from ligerprof.models.config_keys import Dropout
from ligerprof.models.layer_tape import Operand, Step, layer_tape
from ligerprof.models.mixtures import Experts
from ligerprof.roles import Role
from ligerprof.torch_memory.dtypes import FP32_BYTES

_VIEWS = ("cut", "split", "expand", "write")


def run_layer(context: Context, value: Value, index: int, output_role: Role) -> Value:
    """Run one decoder layer on the residual stream `value`, which the caller still holds."""
    return _Replay(context, value, f"{context.spec.architecture.layers}.{index}", output_role).run(
        layer_tape(context.spec, index)
    )


class _Replay:
    """Runs the steps of a layer's tape.

    Args:
        value: the layer's input, which is never dropped.
        name: the layer's path.
    """

    def __init__(self, context: Context, value: Value, name: str, output_role: Role) -> None:
        self._context, self._tape, self._name, self._output_role = context, context.tape, name, output_role
        self._values: dict[int, Value] = {0: value}
        # the value whose memory a value shows, and by that the variables that end when it is dropped
        self._roots: dict[int, int] = {0: 0}
        self._held: dict[int, list[Value]] = {0: []}
        # norms that a kernel has computed with the addition before them
        self._normed: dict[int, tuple[Value, ...]] = {}
        self._role = Role.ACTIVATIONS

    def run(self, steps: Sequence[Step]) -> Value:
        """The layer's output."""
        at, (_, output) = 0, steps[-1]
        while at < len(steps) - 1:
            kind, results, *rest = steps[at]
            at += 1
            if kind == "drop":
                self._tape.release(*self._held.pop(results))
                continue
            operands, *details = rest
            values = [self._operand(item) for item in operands]
            if kind in ("gated", "rotate"):
                made = self._by_kernel(kind, values, *details[:-1])
                at += details[-1] if made else 0
            elif kind == "add" and (name := self._norm_after(steps[at : at + 2], results)) is not None:
                made = self._add_and_norm(values, name)
            else:
                made = self._normed.pop(results, ()) if kind == "norm" else ()
                self._role = self._output_role if results == output else Role.ACTIVATIONS
                made = made or _MAKE[kind](self, values, details)
            self._put(results, made, self._roots[operands[0]] if kind in _VIEWS else None)
        return self._values[output]

    def _put(self, results: int | Sequence[int], made: Sequence[Value | None], root: int | None) -> None:
        """Give values their numbers; those of views end with the memory that they show."""
        for number, value in zip([results] if isinstance(results, int) else results, made, strict=False):
            self._roots[number] = number if root is None else root
            held = self._held.setdefault(self._roots[number], [])
            if value is not None:
                self._values[number] = value
                held.append(value)

    def _operand(self, operand: Operand) -> Tensor | str:
        if isinstance(operand, int):
            return self._values[operand]
        if operand.startswith("p:"):
            return self._context.weights[f"{self._name}.{operand[2:]}"]
        return operand

    def _norm(self, value: Value, path: str) -> Value:
        return norm(self._context, value, f"{self._name}.{path}")

    def _dropout(self, value: Value, key: str | None, rate: float) -> Value:
        found = rate if key is None else self._context.spec.dropout_rate(Dropout(key=key, default=rate))
        return dropout(self._context, value, found)

    def _table(self, elements: str, like: Operand) -> Value:
        """A tensor without a gradient, with so many elements for each token of a sequence."""
        per_token = {"one": 1, "rotated": self._context.spec.rotary_dim}[elements]
        return self._tape.run(Operation(elements=self._context.recipe.row_tokens * per_token, width=self._width(like)))

    def _add(self, left: Value, right: Value | None = None) -> Value:
        """The sum of two values, or of one and a number."""
        if right is None:
            return self._tape.run(Operation(elements=left.elements, width=left.width, passes=(left,)))
        return add(self._context, left, right, role=self._role)

    def _subtract(self, left: Value, right: Value) -> Value:
        width = max(left.width, right.width)
        return self._tape.run(Operation(elements=left.elements, width=width, inputs=(right,), passes=(left,)))

    def _width(self, like: Operand) -> int:
        """Bytes per element of what is in fp32, or has the dtype of a value or of the residual stream."""
        if isinstance(like, int):
            return self._values[like].width
        return FP32_BYTES if like == "wide" else self._context.stream_bytes

    def _project(self, value: Value, path: str) -> Value:
        context = self._context
        projected = project(context, value, f"{self._name}.{path}")
        row, leaf = context.spec.architecture.attention, path.rpartition(".")[2]
        is_part = path.startswith(f"{row.name}.") and leaf in row.qkv and context.spec.latent is None
        if is_part and _comes_by_heads(context, row.qkv.index(leaf)):
            return renamed(context, projected, as_heads(context, projected))
        return projected

    def _cut(self, value: Value, share: str) -> Value:
        """A view of a part, whose gradient is copied into zeros as large as the whole."""
        spec = self._context.spec
        heads = spec.heads + 2 * spec.kv_heads
        part, whole = {
            "half": (1, 2),
            "rotated": (spec.rotary_dim, spec.head_dim),
            "rest": (spec.head_dim - spec.rotary_dim, spec.head_dim),
            "query": (spec.heads, heads),
            "key": (spec.kv_heads, heads),
        }[share]
        if part == whole:
            return self._tape.name(value)
        return self._tape.slice(value, value.elements * part // whole)

    def _split(self, value: Value, parts: int | Sequence[str]) -> tuple[Value, ...]:
        """Views of equal parts, or of parts of latents."""
        if isinstance(parts, int):
            return self._tape.split(value, parts)
        sizes = self._context.spec.latent
        assert sizes is not None
        widths = {
            "plain": sizes.plain_dim,
            "rotated": sizes.rotated_dim,
            "value": sizes.value_dim,
            "latent key": sizes.key_rank,
        }
        whole = sum(widths[part] for part in parts)
        return self._tape.split(value, tuple(value.elements * widths[part] // whole for part in parts))

    def _expand(self, value: Value) -> Value:
        """A view with a copy for each head, whose gradients are added up."""
        elements = value.elements * self._context.spec.heads
        return self._tape.run(Operation(elements=elements, width=value.width, inputs=(value,), view_of=value))

    def _empty(self, _elements: str, like: Operand) -> Value:
        """Memory for the plain and the rotated elements of each head."""
        sizes = self._context.spec.latent
        assert sizes is not None
        elements = self._context.tokens * self._context.spec.heads * (sizes.plain_dim + sizes.rotated_dim)
        return self._tape.run(Operation(elements=elements, width=self._width(like)))

    def _write(self, base: Value, value: Value) -> Value:
        """`base[...] = value`: CopySlices copies the gradient of all of it, and that of the part once more."""
        return self._tape.run(
            Operation(
                elements=base.elements,
                width=base.width,
                inputs=(base, value) if base.needs_gradient else (value,),
                view_of=base,
                backward_scratch_bytes=0 if base.needs_gradient else base.size_bytes,
            )
        )

    def _join(self, *parts: Value) -> Value:
        """`torch.cat`: in the widest dtype; gradients of that dtype are views."""
        width = max(part.width for part in parts)
        return self._tape.run(
            Operation(
                elements=sum(part.elements for part in parts),
                width=width,
                inputs=tuple(part for part in parts if part.width != width),
                passes=tuple(part for part in parts if part.width == width),
            )
        )

    def _multiply(self, left: Any, right: Any = None) -> Value:
        """The product of two values, of a value and a tensor without a gradient, or of a value and a number."""
        context = self._context
        if right is None:
            return scale(context, left)
        if isinstance(right, str):
            return self._times_table(left, right, ())
        if not right.needs_gradient and right.elements < left.elements:
            return self._times_table(left, right.width, (right,))
        return multiply(context, left, right)

    def _times_table(self, value: Value, table: str | int, saves: tuple[Value, ...]) -> Value:
        """Times a tensor without a gradient; if that is wider, the gradient is computed in its dtype and cast."""
        table_bytes, scratch_bytes = table if isinstance(table, int) else self._table_bytes(table), 0
        width = max(value.width, table_bytes)
        if table == "complex":
            # backward multiplies by the conjugate, a copy of the table
            scratch_bytes = self._context.recipe.row_tokens * self._context.spec.rotary_dim * FP32_BYTES
        elif width != value.width:
            scratch_bytes = value.elements * width
        return self._tape.run(
            Operation(
                elements=value.elements, width=width, inputs=(value,), saves=saves, backward_scratch_bytes=scratch_bytes
            )
        )

    def _table_bytes(self, kind: str) -> int:
        """FSDP2's mixed precision casts what layers receive."""
        narrow = kind == "narrow" or (kind == "wide" and self._context.recipe.casts_gathered)
        return self._context.stream_bytes if narrow else FP32_BYTES

    def _mixture(self, value: Value, path: str) -> Sequence[Value]:
        experts = self._context.spec.architecture.mlp.experts
        assert experts is not None
        return [_run_experts(self._context, value, f"{self._name}.{path}", experts)]

    def _experts(self, value: Value, path: str) -> Sequence[Value]:
        """Experts without the one that all tokens share."""
        experts = self._context.spec.architecture.mlp.experts
        assert experts is not None
        output, variables = run_experts(self._context, value, f"{self._name}.{path}", experts)
        self._tape.release(*variables)
        return [output]

    def _mix(self, value: Value) -> Sequence[Value]:
        """A layer's mixer of tokens that is not attention."""
        row = self._context.spec.architecture
        mix = delta_net if row.delta is not None else short_conv if row.short_conv is not None else mix_states
        return [mix(self._context, value, self._name, project)]

    def _by_kernel(self, kind: str, values: Sequence[Any], path: str = "") -> Sequence[Value]:
        """What a kernel makes in place of the steps that follow; nothing without one."""
        context = self._context
        if kind == "rotate":
            return rotate_both(context, *values) if find_slot(Feature.ROTARY).name in context.kernels else ()
        gate = context.spec.architecture.mlp.gate
        slot = "" if gate is None else find_slot(gate).name
        name = f"{self._name}.{path}"
        fused = slot in context.kernels or takes_gates(context, f"{name}.{context.spec.architecture.mlp.down}")
        return [_gated_mlp(context, values[0], name, slot)] if fused else ()

    def _norm_after(self, following: Sequence[Step], added: int) -> tuple[int, str] | None:
        """Number and path of the norm that a kernel computes with an addition."""
        if not adds_in_norm(self._context):
            return None
        path = self._context.spec.architecture.layer_norms.before_mlp
        found = (step for step in following if step[0] == "norm" and step[2] == [added] and step[3] == path)
        return next(((step[1], step[3]) for step in found), None)

    def _add_and_norm(self, values: Sequence[Any], norm_after: tuple[int, str]) -> Sequence[Value]:
        residual, added = values
        number, path = norm_after
        # the kernel drops what it adds, and so does the tape
        self._tape.name(added)
        middle, normed = add_and_norm(self._context, residual, added, f"{self._name}.{path}")
        self._normed[number] = (normed,)
        return [middle]


# what makes the results of a step, from its operands and what else it says
_MAKE: Mapping[str, Callable[[_Replay, Sequence[Any], Sequence[Any]], Sequence[Value | None]]] = {
    "linear": lambda replay, operands, details: [replay._project(*operands, *details)],
    "norm": lambda replay, operands, details: [replay._norm(*operands, *details)],
    "bare norm": lambda replay, operands, _: [bare_rms_norm(replay._context, *operands, replay._context.spec.head_dim)],
    "activate": lambda replay, operands, _: [activate(replay._context, *operands, replay._context.spec.activation)],
    "attend": lambda replay, operands, _: attend(replay._context, *operands),
    "mixture": lambda replay, operands, details: replay._mixture(*operands, *details),
    "experts": lambda replay, operands, details: replay._experts(*operands, *details),
    "mixer": lambda replay, operands, _: replay._mix(*operands),
    "dropout": lambda replay, operands, details: [replay._dropout(*operands, *details)],
    "split": lambda replay, operands, details: replay._split(*operands, *details),
    "cut": lambda replay, operands, details: [replay._cut(*operands, *details)],
    "join": lambda replay, operands, _: [replay._join(*operands)],
    "cast": lambda replay, operands, details: [replay._context.cast(*operands, replay._width(*details))],
    "copy": lambda replay, operands, _: [in_order(replay._context, *operands, copies=True)],
    "expand": lambda replay, operands, _: [replay._expand(*operands)],
    "empty": lambda replay, _, details: [replay._empty(*details)],
    "write": lambda replay, operands, _: [replay._write(*operands)],
    "table": lambda replay, _, details: [replay._table(*details)],
    "keep input": lambda replay, operands, _: [unary(replay._context, *operands)],
    "keep output": lambda replay, operands, _: [unary(replay._context, *operands, saves_output=True)],
    "add": lambda replay, operands, _: [replay._add(*operands)],
    "subtract": lambda replay, operands, _: [replay._subtract(*operands)],
    "multiply": lambda replay, operands, _: [replay._multiply(*operands)],
    "negate": lambda replay, operands, _: [scale(replay._context, *operands)],
}


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


def _comes_by_heads(context: Context, which: int) -> bool:
    """Whether the gradient of query, key or value comes with its heads apart, as eager attention computes it.

    The view of a projection as heads has it copied; norms between the two are not known to pass it on as it is.
    """
    row, spec = context.spec.architecture.attention, context.spec
    turns = which < 2 and context.rotates and find_slot(Feature.ROTARY).name in context.kernels
    if not is_eager(context.recipe) or len(row.qkv) == 1 or row.qk_norms is not None or turns:
        return False
    return (spec.heads if which == 0 else spec.kv_heads) > 1


def _run_experts(context: Context, value: Value, name: str, row: Experts) -> Value:
    expert, gate = row.shared if context.spec.shared_size else None, context.spec.architecture.mlp.gate
    if row.multiplies_all:
        assert expert is not None
        assert gate is not None
        routed, variables = run_all_experts(context, value, name, row)
        output = _gated_mlp(context, value, f"{name}.{expert.name}", find_slot(gate).name)
        return add_routed(context, output, routed, variables)
    if expert is None or gate is None:
        output, variables = run_experts(context, value, name, row)
        context.tape.release(*variables)
        return output
    slot = find_slot(gate).name
    shared = None if expert.runs_last else _gated_mlp(context, value, f"{name}.{expert.name}", slot)
    output, variables = run_experts(context, value, name, row)
    if shared is None:
        shared = _gated_mlp(context, value, f"{name}.{expert.name}", slot)
    weight = None if expert.gate is None else project(context, value, f"{name}.{expert.gate}")
    output = add_shared_expert(context, output, shared, weight)
    context.tape.release(*variables)
    return output


def _gated_mlp(context: Context, value: Value, name: str, slot: str) -> Value:
    """`down_proj(act(gate_proj(x)) * up_proj(x))` by kernels, and that of an expert which all tokens share."""
    tape, row = context.tape, context.spec.architecture.mlp
    down = f"{name}.{row.down}"
    if takes_gates(context, down):
        gate, up, *joint = _gate_and_up(context, value, name)
        output = gated_linear(context, gate, up, down)
        tape.release(gate, up, *joint)
        return _scaled_output(context, output)
    if slot in context.kernels:
        gate, up, *joint = _gate_and_up(context, value, name)
        product = gated_product(context, gate, up, slot)
        # Python frees a tuple's items from the last one on
        tape.release(up, gate, *joint)
    else:
        gate_name, up_name = row.inputs
        activated = project(context, value, f"{name}.{gate_name}")
        activated = renamed(context, activated, activate(context, activated, context.spec.activation))
        up = project(context, value, f"{name}.{up_name}")
        product = multiply(context, activated, up)
        tape.release(activated, up)
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
