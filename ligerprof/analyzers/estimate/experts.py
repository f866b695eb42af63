"""A mixture of experts on the tape: router, and the grouped products of transformers' `grouped_mm_experts_forward`.

All chosen pairs of token and expert are rows of one tensor, sorted by expert, so no size depends on the routing.
`expert_loop.py` has experts that run one after another.
"""

from collections.abc import Callable, Mapping

from ligerprof.analyzers.estimate.activations import activate
from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.expert_loop import clamped_product, experts_in_turn
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.operations import (
    add,
    factor_of,
    linear,
    multiply,
    product_operator,
    renamed,
    scale,
    scale_rows,
    unary,
)
from ligerprof.analyzers.estimate.tensors import Tensor, Value, Weight
from ligerprof.models.mixers import Experts, Scoring
from ligerprof.torch_memory import softmax
from ligerprof.torch_memory.dtypes import FP32_BYTES, INDEX_BYTES, INT32_BYTES

# tokens of an expert that one program of liger-kernel's takes
_LIGER_TILE = 64


def run_experts(context: Context, value: Value, name: str, row: Experts) -> tuple[Value, tuple[Value, ...]]:
    """The experts' outputs of each token, weighted by the router and added up, and the variables of the MLP."""
    read = _with_noise(context, value, row)
    logits, scores, choices = _route(context, read, f"{name}.{row.router}", row)
    run, of_experts = _grouped, context.tape.name(read)
    if _fuses_experts(context):
        run = _fused
    elif context.recipe.runs_experts_in_turn:
        run = experts_in_turn
        if row.shared is None or row.shared.runs_last:
            # their gradients add up in a view of the tokens, before those of a shared expert or the residual join them
            view = Operation(elements=read.elements, width=read.width, passes=(read,), view_of=read)
            of_experts = renamed(context, of_experts, context.tape.run(view))
    experts = run(context, of_experts, scores, f"{name}.{row.name}", clamped=row.clamped)
    context.tape.release(of_experts)
    return experts, (logits, scores, choices, read)


def _with_noise(context: Context, value: Value, row: Experts) -> Value:
    """`value *= noise` in place; in the router, it is a view, and the gradient is copied twice (CopySlices)."""
    read = context.tape.name(value)
    if row.noise is None or not context.spec.setting(row.noise):
        return read
    for copies in (0, 2) if row.noise_in_router else (0,):
        noisy = Operation(
            elements=value.elements,
            width=value.width,
            inputs=(read,),
            view_of=read,
            extra_saved_bytes=value.size_bytes,
            backward_scratch_bytes=copies * value.size_bytes,
        )
        read = renamed(context, read, context.tape.run(noisy))
    return read


def _route(context: Context, value: Value, name: str, row: Experts) -> tuple[Value, Value, Value]:
    """TopKRouter.forward: logits, the scores of the chosen experts, and their indices."""
    tape, chosen = context.tape, context.tokens * context.spec.chosen_experts
    if row.widens_router:
        logits = _wide_logits(context, value, name, autocasts=row.scoring is not Scoring.BIASED_SOFTMAX)
    else:
        logits = linear(context, value, context.weights[f"{name}.weight"], context.weights.get(f"{name}.bias"))
    if row.scoring is Scoring.BIASED_SOFTMAX:
        return _soften_and_divide(context, logits, value.width)
    if row.scoring is Scoring.SOFTMAX_OF_CHOSEN:
        return _soften_chosen(context, logits) if row.widens_chosen else _soften_narrow(context, logits)
    if row.scoring in _SCORES:
        return _SCORES[row.scoring](context, logits)
    probabilities = _soften(context, logits, casts=row.casts_logits)
    choices = tape.run(Operation(elements=chosen, width=INDEX_BYTES))
    scores = tape.run(Operation(elements=chosen, width=FP32_BYTES, inputs=(probabilities,), saves=(choices,)))
    if context.spec.normalizes_scores:
        scores = _divide_by_sums(context, scores)
    if row.narrows_scores:
        scores = renamed(context, scores, context.cast(scores, logits.width))
    tape.release(probabilities)
    return logits, scores, choices


def _wide_logits(context: Context, value: Value, name: str, *, autocasts: bool) -> Value:
    """The logits of input and weight that are cast to fp32; autocast, unless it is off, casts them back."""
    tape, weight = context.tape, context.weights[f"{name}.weight"]
    wide = context.cast(value, FP32_BYTES)
    read = context.autocast(wide) if autocasts else tape.name(wide)
    tape.release(wide)
    factor: Tensor = weight
    if weight.width != FP32_BYTES:
        factor = wide_factor = tape.run(Operation(elements=weight.elements, width=FP32_BYTES, inputs=(weight,)))
        if autocasts:
            factor = renamed(context, wide_factor, context.autocast(wide_factor))
    elif autocasts:
        factor = context.autocast_weight(weight)
    logits = tape.run(
        Operation(
            elements=context.tokens * context.spec.experts,
            width=read.width,
            inputs=(factor, read),
            saves=((read,) if factor.needs_gradient else ()) + ((factor,) if value.needs_gradient else ()),
            gradient_is_view=True,
            is_product=True,
            operator=product_operator(None),
            factor=factor_of(context, value, weight),
        )
    )
    tape.release(read)
    if isinstance(factor, Value) and (weight.width != FP32_BYTES or not weight.trainable):
        tape.release(factor)
    return logits


def _soften_and_divide(context: Context, logits: Value, width: int) -> tuple[Value, Value, Value]:
    """Softmax; a bias decides which experts are chosen; their scores are divided by their sum and cast."""
    tape, chosen = context.tape, context.tokens * context.spec.chosen_experts
    every = tape.run(Operation(elements=logits.elements, width=FP32_BYTES, inputs=(logits,), saves_output=True))
    choices = tape.run(Operation(elements=chosen, width=INDEX_BYTES, forward_scratch_bytes=logits.size_bytes))
    best = tape.run(Operation(elements=chosen, width=FP32_BYTES, inputs=(every,), saves=(choices,)))
    divided = tape.run(
        Operation(
            elements=chosen,
            width=FP32_BYTES,
            inputs=(best,),
            saves=(best,),
            extra_saved_bytes=context.tokens * FP32_BYTES,
        )
    )
    tape.release(best, every)
    return logits, renamed(context, divided, context.cast(divided, width)), choices


def _squash(context: Context, logits: Value) -> tuple[Value, Value, Value]:
    """Sigmoid; a bias and the scores of groups decide which experts are chosen, in tensors that end with the router."""
    tape, chosen = context.tape, context.tokens * context.spec.chosen_experts
    every = unary(context, logits, saves_output=True)
    choices = tape.run(
        Operation(elements=chosen, width=INDEX_BYTES, forward_scratch_bytes=3 * logits.elements * FP32_BYTES)
    )
    scores = tape.run(Operation(elements=chosen, width=every.width, inputs=(every,), saves=(choices,)))
    if context.spec.normalizes_scores:
        scores = _divide_by_sums(context, scores)
    scores = renamed(context, scores, scale(context, scores))
    tape.release(every)
    return logits, scores, choices


def _squash_wide(context: Context, logits: Value) -> tuple[Value, Value, Value]:
    """Sigmoid in fp32; a bias decides which experts are chosen; their scores are divided by their sum."""
    tape, chosen = context.tape, context.tokens * context.spec.chosen_experts
    wide = context.cast(logits, FP32_BYTES)
    every = unary(context, wide, saves_output=True)
    tape.release(wide)
    biased = tape.run(Operation(elements=logits.elements, width=FP32_BYTES))
    choices = tape.run(Operation(elements=chosen, width=INDEX_BYTES, forward_scratch_bytes=chosen * FP32_BYTES))
    scores = tape.run(Operation(elements=chosen, width=FP32_BYTES, inputs=(every,), saves=(choices,)))
    scores = _divide_by_sums(context, scores)
    tape.release(every, biased)
    return logits, scores, choices


def _soften_and_scale(context: Context, logits: Value) -> tuple[Value, Value, Value]:
    """Softmax in fp32; if only some groups count, the scores of the others become 0; the chosen scores are scaled."""
    tape, chosen = context.tape, context.tokens * context.spec.chosen_experts
    every = _soften(context, logits, casts=False)
    held: tuple[Value, ...] = ()
    if context.spec.setting("topk_method") == "group_limited_greedy":
        held = (tape.run(Operation(elements=every.elements, width=FP32_BYTES)),)
        masked = Operation(
            elements=every.elements,
            width=FP32_BYTES,
            inputs=(every,),
            extra_saved_bytes=every.elements,
            forward_scratch_bytes=every.elements,
        )
        every = renamed(context, every, tape.run(masked))
    choices = tape.run(Operation(elements=chosen, width=INDEX_BYTES))
    best = tape.run(Operation(elements=chosen, width=FP32_BYTES, inputs=(every,), saves=(choices,)))
    scores = renamed(context, best, scale(context, best))
    tape.release(every, *held)
    return logits, scores, choices


def _draw(context: Context, logits: Value) -> tuple[Value, Value, Value]:
    """`sparsemixer`: draws two experts in turn; only the logits receive gradients, by a function of its own."""
    tape, tokens = context.tape, context.tokens
    scores, choices, held = list[Value](), list[Value](), list[Value]()
    read = logits
    for first in (True, False):
        if not first:
            index = choices[0]
            read = tape.run(Operation(elements=logits.elements, width=logits.width, inputs=(logits,), saves=(index,)))
            held.append(read)
        mask = tape.run(Operation(elements=logits.elements, width=1, forward_scratch_bytes=2 * logits.size_bytes))
        masked = tape.run(Operation(elements=logits.elements, width=logits.width, inputs=(read,), saves=(mask,)))
        choice = tape.run(Operation(elements=tokens, width=INDEX_BYTES, forward_scratch_bytes=2 * logits.size_bytes))
        soft = _soften_in_place_of(context, masked)
        chance = tape.run(Operation(elements=tokens, width=soft.width, inputs=(soft,), saves=(choice,)))
        score = tape.run(
            Operation(
                elements=tokens,
                width=soft.width,
                inputs=(logits,),
                saves=(chance, choice, soft),
                backward_scratch_bytes=soft.size_bytes,
                in_function=True,
            )
        )
        tape.release(mask, chance)
        held.append(soft)
        scores.append(score)
        choices.append(choice)
    joined = tape.run(Operation(elements=2 * tokens, width=scores[0].width, passes=tuple(scores)))
    joined_choices = tape.run(Operation(elements=2 * tokens, width=INDEX_BYTES))
    tape.release(*held, *scores, *choices)
    return logits, joined, joined_choices


def _soften_in_place_of(context: Context, masked: Value) -> Value:
    """The softmax of the masked logits, which replaces them; autocast computes it in fp32."""
    if context.result_width("softmax.int", masked) == FP32_BYTES:
        return renamed(context, masked, _soften(context, masked, casts=False))
    soft = context.tape.run(
        Operation(elements=masked.elements, width=masked.width, inputs=(masked,), saves_output=True)
    )
    return renamed(context, masked, soft)


_SCORES: Mapping[Scoring, Callable[[Context, Value], tuple[Value, Value, Value]]] = {
    Scoring.SIGMOID: _squash,
    Scoring.WIDE_SIGMOID: _squash_wide,
    Scoring.GROUPED_SOFTMAX: _soften_and_scale,
    Scoring.DRAWN: _draw,
}


def _divide_by_sums(context: Context, scores: Value) -> Value:
    """`scores /= sums`: an in-place division, which keeps the divisors and a copy of what it overwrites."""
    divided = Operation(
        elements=scores.elements,
        width=scores.width,
        inputs=(scores,),
        view_of=scores,
        extra_saved_bytes=scores.size_bytes + context.tokens * FP32_BYTES,
    )
    return renamed(context, scores, context.tape.run(divided))


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


def _soften_narrow(context: Context, logits: Value) -> tuple[Value, Value, Value]:
    """The logits, the softmax of those of the chosen experts in their own dtype, and their indices."""
    tape, chosen = context.tape, context.tokens * context.spec.chosen_experts
    choices = tape.run(Operation(elements=chosen, width=INDEX_BYTES))
    best = tape.run(Operation(elements=chosen, width=logits.width, inputs=(logits,), saves=(choices,)))
    scores = tape.run(Operation(elements=chosen, width=logits.width, inputs=(best,), saves_output=True))
    tape.release(best)
    return logits, scores, choices


def add_shared_expert(context: Context, output: Value, shared: Value, gate: Value | None) -> Value:
    """`output + shared`, or `output + sigmoid(gate) * shared` with one number per token in the gate."""
    tape = context.tape
    if gate is not None:
        factor = renamed(context, gate, unary(context, gate, saves_output=True))
        shared = renamed(context, shared, scale_rows(context, shared, factor))
        tape.release(factor)
    total = add(context, output, shared)
    tape.release(output, shared)
    return total


def _soften(context: Context, logits: Value, *, casts: bool) -> Value:
    """`softmax` in fp32, of logits that the router casts first or not."""
    dtype = "float32" if logits.width == FP32_BYTES else context.recipe.compute_dtype
    casts = casts or softmax.casts_first(dtype, "float32")
    wide = context.cast(logits, FP32_BYTES) if casts else context.tape.name(logits)
    soft = context.tape.run(Operation(elements=wide.elements, width=FP32_BYTES, inputs=(wide,), saves_output=True))
    context.tape.release(wide)
    return soft


def _grouped(context: Context, value: Value, scores: Value, name: str, *, clamped: bool) -> Value:
    """`grouped_mm_experts_forward` of transformers/integrations/moe.py; its variables live until it returns."""
    tape, pairs, hidden = context.tape, scores.elements, context.spec.hidden_size
    order = [tape.run(Operation(elements=pairs, width=INDEX_BYTES)) for _ in ("expert of each pair", "pair")]
    token = tape.run(Operation(elements=pairs, width=INDEX_BYTES))
    selected = tape.run(Operation(elements=pairs * hidden, width=value.width, inputs=(value,), saves=(token,)))
    tape.release(token)
    sorted_scores = tape.run(Operation(elements=pairs, width=scores.width, inputs=(scores,), saves=(order[1],)))
    joint, biases = _grouped_linear(context, selected, f"{name}.gate_up_proj", order[0])
    if clamped:
        product = clamped_product(context, joint)
    else:
        gate, up = tape.split(joint, 2)
        activated = activate(context, gate, context.spec.activation)
        product = multiply(context, activated, up)
        tape.release(activated, gate, up)
    product = renamed(context, joint, product)
    output, more_biases = _grouped_linear(context, product, f"{name}.down_proj", order[0], biases)
    output = renamed(context, product, output)
    weighted = scale_rows(context, output, sorted_scores)
    inverse = tape.run(Operation(elements=pairs, width=INDEX_BYTES, forward_scratch_bytes=pairs * INDEX_BYTES))
    restored = tape.run(
        Operation(elements=weighted.elements, width=weighted.width, inputs=(weighted,), saves=(inverse,))
    )
    weighted = renamed(context, weighted, restored)
    total = _sum_choices(context, weighted)
    result = context.cast(total, value.width)
    tape.release(total, weighted, inverse, output, sorted_scores, selected, *order, *more_biases)
    return result


def _fuses_experts(context: Context) -> bool:
    return any(kernel.fuses_experts(context.spec) for kernel in context.kernels.values())


def _fused(context: Context, value: Value, scores: Value, name: str, *, clamped: bool) -> Value:  # noqa: ARG001
    """liger-kernel's LigerFusedMoEFunction: backward computes what the second product reads again."""
    weights = (context.weights[f"{name}.gate_up_proj"], context.weights[f"{name}.down_proj"])
    experts, gates, hidden = weights[0].shape
    gates_bytes, outputs_bytes = (scores.elements * columns * value.width for columns in (gates, hidden))
    tiles = scores.elements // _LIGER_TILE + experts
    indices = 3 * scores.elements + 2 * tiles + experts + 1
    return context.tape.run(
        Operation(
            elements=context.tokens * hidden,
            width=value.width,
            inputs=(value, *weights, scores),
            saves=(value, *weights, scores),
            extra_saved_bytes=gates_bytes + indices * INT32_BYTES,
            forward_scratch_bytes=(gates_bytes // 2, outputs_bytes),
            # gradients of frozen weights are computed, too
            leading_gradient_scratch=(
                gates_bytes,
                gates_bytes // 2,
                outputs_bytes,
                *(weight.size_bytes for weight in weights if not weight.trainable),
            ),
            in_function=True,
        )
    )


def _sum_choices(context: Context, weighted: Value) -> Value:
    """`weighted.view(tokens, chosen, hidden).sum(dim=1)`: the expanded gradient is copied, to be cast or to be rows."""
    width = context.result_width("sum.dim_IntList", weighted)
    is_view = width == weighted.width and context.spec.chosen_experts == 1
    return context.tape.run(
        Operation(
            elements=weighted.elements // context.spec.chosen_experts,
            width=width,
            inputs=() if is_view else (weighted,),
            passes=(weighted,) if is_view else (),
        )
    )


def _grouped_linear(
    context: Context, value: Value, name: str, experts: Value, variables: tuple[Value, ...] = ()
) -> tuple[Value, tuple[Value, ...]]:
    """The product, to which the biases of each pair's expert are added in place; a variable holds the biases.

    Args:
        experts: the expert of each pair.
        variables: what that variable held before.
    """
    tape, bias = context.tape, context.weights.get(f"{name}_bias")
    if bias is None:
        return _grouped_product(context, value, context.weights[name]), ()
    rows = experts.elements
    biases = tape.run(
        Operation(
            elements=rows * bias.shape[1],
            width=bias.width,
            inputs=(bias,),
            saves=(experts,),
            # the indices are sorted
            backward_scratch_bytes=4 * rows * INDEX_BYTES,
        )
    )
    tape.release(*variables)
    product = _grouped_product(context, value, context.weights[name])
    added = Operation(elements=product.elements, width=product.width, passes=(product, biases), view_of=product)
    return renamed(context, product, tape.run(added)), (biases,)


def _grouped_product(context: Context, value: Value, weight: Weight) -> Value:
    """`grouped_mm(x.to(weight.dtype), weight.transpose(-2, -1))`: saves both; autocast leaves it alone."""
    inputs = value.elements // (context.tokens * context.spec.chosen_experts)
    outputs = weight.elements // (weight.shape[0] * inputs)
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
