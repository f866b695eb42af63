"""A mixture of experts on the tape: router, and the grouped products of transformers' `grouped_mm_experts_forward`.

All chosen pairs of token and expert are rows of one tensor, sorted by expert, so no size depends on the routing.
"""

from ligerprof.analyzers.estimate.activations import activate
from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.operations import add, linear, multiply, renamed, unary
from ligerprof.analyzers.estimate.tensors import Value, Weight
from ligerprof.models.architecture import Experts
from ligerprof.torch_memory import softmax
from ligerprof.torch_memory.dtypes import FP32_BYTES, INDEX_BYTES


def run_experts(context: Context, value: Value, name: str, row: Experts) -> Value:
    """The experts' outputs of each token, weighted by the router and added up."""
    tape = context.tape
    logits, scores, choices = _route(context, value, f"{name}.{row.router}", row)
    output = _grouped(context, value, scores, f"{name}.{row.name}")
    tape.release(logits, scores, choices)
    return output


def _route(context: Context, value: Value, name: str, row: Experts) -> tuple[Value, Value, Value]:
    """TopKRouter.forward: logits, the scores of the chosen experts, and their indices."""
    tape, chosen = context.tape, context.tokens * context.spec.chosen_experts
    logits = linear(context, value, context.weights[f"{name}.weight"])
    if row.softens_chosen:
        return _soften_chosen(context, logits)
    probabilities = _soften(context, logits, casts=row.casts_logits)
    choices = tape.run(Operation(elements=chosen, width=INDEX_BYTES))
    scores = tape.run(Operation(elements=chosen, width=FP32_BYTES, inputs=(probabilities,), saves=(choices,)))
    if context.spec.normalizes_scores:
        # an in-place division, which keeps the divisors and a copy of what it overwrites
        kept_bytes = (chosen + context.tokens) * FP32_BYTES
        divided = Operation(
            elements=chosen, width=FP32_BYTES, inputs=(scores,), view_of=scores, extra_saved_bytes=kept_bytes
        )
        scores = renamed(context, scores, tape.run(divided))
    if row.narrows_scores:
        scores = renamed(context, scores, context.cast(scores, logits.width))
    tape.release(probabilities)
    return logits, scores, choices


def _soften_chosen(context: Context, logits: Value) -> tuple[Value, Value, Value]:
    """The logits in fp32, the softmax of those of the chosen experts, and their indices."""
    tape, chosen = context.tape, context.tokens * context.spec.chosen_experts
    wide = renamed(context, logits, context.cast(logits, FP32_BYTES))
    choices = tape.run(Operation(elements=chosen, width=INDEX_BYTES))
    best = tape.run(Operation(elements=chosen, width=FP32_BYTES, inputs=(wide,), saves=(choices,)))
    soft = tape.run(Operation(elements=chosen, width=FP32_BYTES, inputs=(best,), saves_output=True))
    scores = renamed(context, soft, context.cast(soft, context.stream_bytes))
    tape.release(best)
    return wide, scores, choices


def add_shared_expert(context: Context, output: Value, shared: Value, gate: Value) -> Value:
    """`output + sigmoid(gate) * shared`, with one number per token in the gate."""
    tape = context.tape
    factor = renamed(context, gate, unary(context, gate, saves_output=True))
    weighted = renamed(context, shared, _weigh(context, shared, factor))
    tape.release(factor)
    total = add(context, output, weighted)
    tape.release(output, weighted)
    return total


def _soften(context: Context, logits: Value, *, casts: bool) -> Value:
    """`softmax` in fp32, of logits that the router casts first or not."""
    dtype = "float32" if logits.width == FP32_BYTES else context.recipe.compute_dtype
    casts = casts or softmax.casts_first(dtype, "float32")
    wide = context.cast(logits, FP32_BYTES) if casts else context.tape.name(logits)
    soft = context.tape.run(Operation(elements=wide.elements, width=FP32_BYTES, inputs=(wide,), saves_output=True))
    context.tape.release(wide)
    return soft


def _grouped(context: Context, value: Value, scores: Value, name: str) -> Value:
    """`grouped_mm_experts_forward` of transformers/integrations/moe.py; its variables live until it returns."""
    tape, pairs, hidden = context.tape, scores.elements, context.spec.hidden_size
    order = [tape.run(Operation(elements=pairs, width=INDEX_BYTES)) for _ in ("expert of each pair", "pair")]
    token = tape.run(Operation(elements=pairs, width=INDEX_BYTES))
    selected = tape.run(Operation(elements=pairs * hidden, width=value.width, inputs=(value,), saves=(token,)))
    tape.release(token)
    sorted_scores = tape.run(Operation(elements=pairs, width=scores.width, inputs=(scores,), saves=(order[1],)))
    joint = _grouped_product(context, selected, context.weights[f"{name}.gate_up_proj"])
    gate, up = tape.split(joint, 2)
    activated = activate(context, gate, context.spec.activation)
    product = multiply(context, activated, up)
    tape.release(activated, gate, up)
    product = renamed(context, joint, product)
    output = renamed(context, product, _grouped_product(context, product, context.weights[f"{name}.down_proj"]))
    weighted = _weigh(context, output, sorted_scores)
    inverse = tape.run(Operation(elements=pairs, width=INDEX_BYTES, forward_scratch_bytes=pairs * INDEX_BYTES))
    restored = tape.run(
        Operation(elements=weighted.elements, width=weighted.width, inputs=(weighted,), saves=(inverse,))
    )
    weighted = renamed(context, weighted, restored)
    # the gradient of a sum is expanded
    total = tape.run(Operation(elements=context.tokens * hidden, width=weighted.width, passes=(weighted,)))
    result = context.cast(total, value.width)
    tape.release(total, weighted, inverse, output, sorted_scores, selected, *order)
    return result


def _grouped_product(context: Context, value: Value, weight: Weight) -> Value:
    """`grouped_mm(x.to(weight.dtype), weight.transpose(-2, -1))`: saves both; autocast leaves it alone."""
    _, outputs, inputs = weight.shape
    read = context.cast(value, weight.width)
    saves = ((read,) if weight.trainable else ()) + ((weight,) if value.needs_gradient else ())
    product = context.tape.run(
        Operation(
            elements=value.elements // inputs * outputs,
            width=weight.width,
            inputs=(read, weight),
            saves=saves,
            gradient_is_view=True,
            is_product=weight.width == FP32_BYTES,
        )
    )
    context.tape.release(read)
    return product


def _weigh(context: Context, output: Value, scores: Value) -> Value:
    """Each pair's output times its score; the score's gradient is summed over the row."""
    width = max(output.width, scores.width)
    return context.tape.run(
        Operation(
            elements=output.elements,
            width=width,
            inputs=(output, scores),
            saves=(output, scores),
            backward_scratch_bytes=output.elements * width,
        )
    )
