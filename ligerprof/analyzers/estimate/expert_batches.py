"""Experts that multiply all tokens: Llama4TextMoe.forward, where scores of zero leave out what was not chosen."""

from ligerprof.analyzers.estimate.activations import activate
from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.operations import linear, multiply, renamed, unary
from ligerprof.analyzers.estimate.tensors import Value
from ligerprof.models.mixers import Experts
from ligerprof.torch_memory.dtypes import FP32_BYTES, INDEX_BYTES
from ligerprof.torch_memory.saved_tensors import BMM


def run_all_experts(context: Context, value: Value, name: str, row: Experts) -> tuple[Value, tuple[Value, ...]]:
    """The outputs of every expert for every token, and the variables that the MLP holds until its end."""
    tape = context.tape
    scores, logits = _route(context, value, f"{name}.{row.router}")
    copies = value.elements * context.spec.experts
    repeated = tape.run(Operation(elements=copies, width=value.width, inputs=(value,)))
    factors = tape.run(Operation(elements=scores.elements, width=scores.width, inputs=(scores,)))
    weighed = tape.run(
        Operation(
            elements=copies,
            width=max(value.width, scores.width),
            inputs=(repeated, factors),
            saves=(repeated, factors),
            # the gradient times the tokens, before it is summed over each row
            backward_scratch_bytes=copies * max(value.width, scores.width),
        )
    )
    tape.release(repeated, factors)
    joint = _batched_product(context, weighed, f"{name}.{row.name}.gate_up_proj")
    gate, up = tape.split(joint, 2)
    activated = activate(context, gate, context.spec.activation)
    product = multiply(context, up, activated)
    tape.release(activated)
    outputs = _batched_product(context, product, f"{name}.{row.name}.down_proj")
    tape.release(product, joint, gate, up)
    return outputs, (weighed, scores, logits)


def add_routed(context: Context, output: Value, routed: Value, variables: tuple[Value, ...]) -> Value:
    """`output.add_(routed.sum(0))`: in place; autocast requests a sum in fp32."""
    tape = context.tape
    # the gradient is expanded, then copied to be cast or to be viewed as rows
    width = context.result_width("sum.dim_IntList", routed)
    total = tape.run(Operation(elements=output.elements, width=width, inputs=(routed,)))
    same = total.width == output.width
    added = Operation(
        elements=output.elements,
        width=output.width,
        inputs=() if same else (total,),
        passes=(output, total) if same else (output,),
        view_of=output,
    )
    result = renamed(context, output, tape.run(added))
    tape.release(total, routed, *variables)
    return result


def _route(context: Context, value: Value, name: str) -> tuple[Value, Value]:
    """Llama4Router.forward: the sigmoid of the chosen logits, 0 for all others, and the logits."""
    tape, chosen = context.tape, context.tokens * context.spec.chosen_experts
    logits = linear(context, value, context.weights[f"{name}.weight"])
    choices = tape.run(Operation(elements=chosen, width=INDEX_BYTES))
    best = tape.run(Operation(elements=chosen, width=logits.width, inputs=(logits,), saves=(choices,)))
    placed = tape.run(Operation(elements=logits.elements, width=logits.width, inputs=(best,), saves=(choices,)))
    wide = context.cast(placed, FP32_BYTES)
    soft = renamed(context, wide, unary(context, wide, saves_output=True))
    scores = context.cast(soft, placed.width)
    tape.release(soft, placed, best, choices)
    return scores, logits


def _batched_product(context: Context, value: Value, name: str) -> Value:
    """`torch.bmm(value, weight)`, one product per expert."""
    tape, weight = context.tape, context.weights[name]
    factor, read = context.autocast_weight(weight), context.autocast(value)
    _, inputs, outputs = weight.shape
    rows = value.elements // inputs
    product = tape.run(
        Operation(
            elements=rows * outputs,
            width=read.width,
            inputs=(factor, read),
            saves=((read,) if weight.trainable else ()) + ((factor,) if value.needs_gradient else ()),
            is_product=True,
            operator=BMM,
        )
    )
    tape.release(read)
    if isinstance(factor, Value) and not weight.trainable:
        tape.release(factor)
    return product
