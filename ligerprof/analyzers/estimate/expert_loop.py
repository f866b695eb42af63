"""Experts that run one after another: the `forward` of transformers' experts classes, `experts_implementation="eager"`.

Each expert reads the rows of its tokens, so sizes depend on the routing. Its weights are views of the layer's
parameters, whose gradients are as large as the whole parameter.
"""

from dataclasses import dataclass

from ligerprof.analyzers.estimate.activations import activate
from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.operations import (
    column_sum,
    multiply,
    product_operator,
    renamed,
    scale,
    scale_rows,
    unary,
)
from ligerprof.analyzers.estimate.tensors import Value, Weight
from ligerprof.recipe.routing import tokens_per_expert
from ligerprof.torch_memory.dtypes import INDEX_BYTES
from ligerprof.torch_memory.saved_tensors import MM
from ligerprof.torch_memory.sorting import index_copies

_BOOL_BYTES = 1


def experts_in_turn(context: Context, value: Value, scores: Value, name: str) -> Value:
    """The outputs of all experts, added up per token."""
    tape, spec = context.tape, context.spec
    counts = tokens_per_expert(
        context.recipe.routing,
        sum(spec.layer_kinds.sparse[: context.layer]),
        tokens=context.tokens,
        experts=spec.experts,
        chosen=spec.chosen_experts,
    )
    hit = [count for count in counts if count]
    for weight_name, weight in context.weights.items():
        if weight_name.startswith(f"{name}."):
            weight.uses = len(hit)
    total = tape.run(Operation(elements=value.elements, width=value.width))
    mask = tape.run(Operation(elements=scores.elements * (spec.experts + 1), width=INDEX_BYTES))
    sums = tape.run(Operation(elements=spec.experts + 1, width=INDEX_BYTES))
    is_hit = tape.run(Operation(elements=spec.experts + 1, width=_BOOL_BYTES))
    tape.release(sums)
    experts_hit = tape.run(Operation(elements=len(hit), width=INDEX_BYTES))
    tape.release(is_hit)
    experts = spec.architecture.mlp.experts
    loop = _Loop(context, value, scores, name, experts is not None and experts.clamped)
    for tokens in hit:
        total = loop.run(tokens, total)
    tape.release(mask, experts_hit, *loop.variables)
    return total


@dataclass(slots=True)
class _Loop:
    """The loop over experts, whose variables keep their tensors until the next expert assigns them.

    Attributes:
        found: positions and tokens that chose the expert, two views of one tensor.
        state: the tokens' hidden states.
        gates: gate and up; or, if clamped, both in one tensor and their product.
        current: the weighted output; before it, if clamped, the output.
    """

    context: Context
    value: Value
    scores: Value
    name: str
    clamped: bool
    found: tuple[Value, ...] = ()
    state: tuple[Value, ...] = ()
    gates: tuple[Value, ...] = ()
    current: tuple[Value, ...] = ()

    @property
    def variables(self) -> tuple[Value, ...]:
        """All variables."""
        return (*self.found, *self.state, *self.gates, *self.current)

    def run(self, tokens: int, total: Value) -> Value:
        """Run the next expert; returns `total` with its outputs added in place."""
        context, tape = self.context, self.context.tape
        found = tape.run(Operation(elements=2 * tokens, width=INDEX_BYTES))
        tape.release(*self.found)
        self.found = (found,)
        elements = tokens * context.spec.hidden_size
        state = tape.run(Operation(elements=elements, width=self.value.width, inputs=(self.value,), saves=(found,)))
        tape.release(*self.state)
        self.state = (state,)
        joint = _expert_linear(context, state, f"{self.name}.gate_up_proj", tokens)
        run = self._run_clamped if self.clamped else self._run_gated
        weighted = run(joint, found, tokens)
        cast = context.cast(weighted, total.width)
        added = Operation(
            elements=total.elements,
            width=total.width,
            passes=(total,),
            inputs=(cast,),
            # the source, too, for its shape
            saves=(found, cast),
            view_of=total,
        )
        total = renamed(context, total, tape.run(added))
        tape.release(cast)
        return total

    def _run_gated(self, joint: Value, found: Value, tokens: int) -> Value:
        context, tape = self.context, self.context.tape
        gate, up = tape.split(joint, 2)
        tape.release(joint, *self.gates)
        self.gates = (gate, up)
        activated = activate(context, gate, context.spec.activation)
        product = multiply(context, activated, up)
        tape.release(activated, *self.current)
        output = renamed(context, product, _expert_linear(context, product, f"{self.name}.down_proj", tokens))
        weighted = renamed(context, output, _weigh_chosen(context, output, self.scores, found, tokens))
        self.current = (weighted,)
        return weighted

    def _run_clamped(self, joint: Value, found: Value, tokens: int) -> Value:
        context, tape = self.context, self.context.tape
        tape.release(*self.gates[:1])
        product = _clamped_product(context, joint)
        tape.release(*self.gates[1:])
        self.gates = (joint, product)
        output = _expert_linear(context, product, f"{self.name}.down_proj", tokens)
        tape.release(*self.current[:1])
        weighted = _weigh_chosen(context, output, self.scores, found, tokens)
        tape.release(*self.current[1:])
        self.current = (output, weighted)
        return weighted


def _weigh_chosen(context: Context, output: Value, scores: Value, found: Value, tokens: int) -> Value:
    """`output * scores[tokens, positions, None]`: the score's gradient is summed over the row."""
    tape = context.tape
    # positions and tokens are columns of one tensor
    copies = index_copies([((2,), tokens * INDEX_BYTES, False)] * 2)
    chosen = tape.run(
        Operation(
            elements=tokens, width=scores.width, inputs=(scores,), saves=(found,), forward_scratch_bytes=sum(copies)
        )
    )
    weighted = scale_rows(context, output, chosen)
    tape.release(chosen)
    return weighted


def _expert_linear(context: Context, value: Value, name: str, tokens: int) -> Value:
    """The product with one expert's weight, plus its bias if there is one."""
    tape, weight = context.tape, context.weights[name]
    bias = context.weights.get(f"{name}_bias")
    view = _view_of_expert(context, weight)
    factor, read = context.autocast(view), context.autocast(value)
    inputs = value.elements // tokens
    outputs = view.elements // inputs
    product = tape.run(
        Operation(
            elements=tokens * outputs,
            width=read.width,
            inputs=(factor, read),
            saves=((read,) if weight.trainable else ()) + ((factor,) if value.needs_gradient else ()),
            gradient_is_view=bias is None,
            is_product=True,
            operator=product_operator(None) if bias is None else MM,
            factor=(inputs, outputs),
        )
    )
    tape.release(factor, read)
    if bias is None:
        return product
    row = _view_of_expert(context, bias)
    sums = column_sum(context, product.elements, row.elements, product.width) if bias.trainable else ()
    width = max(product.width, bias.width)
    added = Operation(
        elements=product.elements,
        width=width,
        inputs=(row,) if product.width == width else (row, product),
        passes=(product,) if product.width == width else (),
        reduction_scratch_bytes=sums,
    )
    return renamed(context, product, tape.run(added))


def _view_of_expert(context: Context, weight: Weight) -> Value:
    """One expert's part of a parameter: no memory of its own; its gradient is copied into zeros for all experts."""
    parameter = Value(0, weight.width, needs_gradient=False, block=None)
    return context.tape.run(
        Operation(elements=weight.elements // weight.shape[0], width=weight.width, inputs=(weight,), view_of=parameter)
    )


def _clamped_product(context: Context, joint: Value) -> Value:
    """GptOssExperts._apply_gate: `(up + 1) * gate * sigmoid(alpha * gate)` of clamped, interleaved gate and up."""
    tape, half = context.tape, joint.elements // 2
    raw = tape.slice(joint, half), tape.slice(joint, half)
    gate = renamed(context, raw[0], unary(context, raw[0]))
    up = renamed(context, raw[1], unary(context, raw[1]))
    scaled = scale(context, gate)
    factor = renamed(context, scaled, unary(context, scaled, saves_output=True))
    gated = multiply(context, gate, factor)
    tape.release(factor)
    shifted = tape.run(Operation(elements=half, width=up.width, passes=(up,)))
    product = multiply(context, shifted, gated)
    tape.release(shifted, gated, gate, up)
    return product
