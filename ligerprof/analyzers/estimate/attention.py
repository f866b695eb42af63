"""Attention as transformers calls it: scaled_dot_product_attention, or separate tensor operations (eager)."""

from ligerprof.analyzers.estimate.context import Context, is_eager
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.operations import dropout, scale, unary
from ligerprof.analyzers.estimate.scaled_dot_product import (
    SCORES,
    cast_scores,
    in_order_of_tokens,
    repeat_heads,
    scaled_dot_product,
    score_product,
    soften,
    weighted_sum,
)
from ligerprof.analyzers.estimate.tensors import Value
from ligerprof.torch_memory.dtypes import FP32_BYTES, INDEX_BYTES


def attend(context: Context, query: Value, key: Value, value: Value) -> tuple[Value, Value | None]:
    """Attention of query (tokens, heads, head_dim) over key and value (tokens, kv_heads, head_dim).

    Returns:
        The output, laid out as the query, and the probabilities where the caller gets them.
    """
    if is_eager(context.recipe):
        return _eager(context, query, key, value)
    return scaled_dot_product(context, query, key, value), None


def _eager(context: Context, query: Value, key: Value, value: Value) -> tuple[Value, Value]:
    """eager_attention_forward: scores, scaling, mask, softmax and cast, each a new tensor."""
    tape = context.tape
    keys, values = repeat_heads(context, key), repeat_heads(context, value)
    # autocast casts the arguments of an operator from the last one on
    read_key, read_query = context.autocast(keys), context.autocast(query)
    product = score_product(context, read_query, read_key)
    tape.release(read_query, read_key)
    scores = scale(context, product, role=SCORES)
    tape.release(product)
    scores = _softcap_scores(context, scores)
    masked = _add_mask(context, scores)
    tape.release(scores)
    if context.spec.architecture.attention.sinks:
        probabilities = _soften_with_sinks(context, masked, value.width)
    else:
        sharp = soften(context, masked, _softmax_width(context, masked))
        probabilities = cast_scores(context, sharp, query.width)
        tape.release(sharp, masked)
    drop = context.spec.dropout_rate(context.spec.architecture.attention.dropout)
    dropped = dropout(context, probabilities, drop)
    tape.release(probabilities)
    read_values, read = context.autocast(values), cast_scores(context, dropped, context.half_bytes or dropped.width)
    summed = weighted_sum(context, read, read_values)
    output = in_order_of_tokens(context, summed) if context.spec.heads > 1 else tape.name(summed)
    tape.release(read, read_values, summed, keys, values)
    return output, dropped


def _soften_with_sinks(context: Context, scores: Value, width: int) -> Value:
    """GPT-OSS: joins each head's learned score, subtracts the highest, softmax, and cuts off the learned column."""
    tape, row = context.tape, context.spec.architecture
    rows = context.tokens * context.spec.heads
    sinks = context.weights[f"{row.layers}.{context.layer}.{row.attention.name}.sinks"]
    joint_width = max(scores.width, sinks.width)
    wide = scores.width != joint_width
    joined = tape.run(
        Operation(
            elements=scores.elements + rows,
            width=joint_width,
            inputs=(scores,) if wide else (),
            passes=() if wide else (scores,),
            role=SCORES,
            gradient_role=SCORES,
        )
    )
    highest = tape.run(
        Operation(elements=rows, width=joint_width, inputs=(joined,), extra_saved_bytes=rows * INDEX_BYTES, role=SCORES)
    )
    lowered = tape.run(
        Operation(
            elements=joined.elements,
            width=joint_width,
            inputs=(highest,),
            passes=(joined,),
            # the negated gradient, before it is summed over the columns
            reduction_scratch_bytes=joined.size_bytes,
            role=SCORES,
            gradient_role=SCORES,
        )
    )
    tape.release(highest, joined)
    sharp = soften(context, lowered, joint_width)
    kept = tape.run(
        Operation(
            elements=scores.elements,
            width=joint_width,
            inputs=(sharp,),
            view_of=sharp,
            role=SCORES,
            gradient_role=SCORES,
        )
    )
    probabilities = cast_scores(context, kept, width)
    tape.release(kept, sharp, lowered, scores)
    return probabilities


def _softmax_width(context: Context, scores: Value) -> int:
    """fp32, as requested or by autocast; GPT-2's code requests no dtype."""
    asks = context.spec.architecture.attention.fp32_softmax or context.half_bytes is not None
    return FP32_BYTES if asks else scores.width


def _softcap_scores(context: Context, scores: Value) -> Value:
    """Gemma 2: divide, tanh, multiply."""
    if context.spec.attention_softcap is None:
        return scores
    divided = scale(context, scores, role=SCORES)
    context.tape.release(scores)
    bent = unary(context, divided, saves_output=True, role=SCORES)
    context.tape.release(divided)
    capped = scale(context, bent, role=SCORES)
    context.tape.release(bent)
    return capped


def _add_mask(context: Context, scores: Value) -> Value:
    width = max(scores.width, context.mask.width if context.mask is not None else 0)
    same = scores.width == width
    return context.tape.run(
        Operation(
            elements=scores.elements,
            width=width,
            inputs=() if same else (scores,),
            passes=(scores,) if same else (),
            role=SCORES,
            gradient_role=SCORES,
        )
    )
