"""Attention as transformers calls it: fused by the GPU's library, composed in fp32, or written out (eager)."""

from ligerprof.analyzers.estimate.context import Context, is_eager
from ligerprof.analyzers.estimate.operations import dropout, renamed, scale, unary
from ligerprof.analyzers.estimate.tape import Operation, Value
from ligerprof.roles import Role
from ligerprof.torch_memory.dtypes import FP32_BYTES, INDEX_BYTES

_SCORES = Role.ATTENTION_TEMPORARIES
# cudnnGraph workspace of one fused forward pass, as recorded
_FUSED_WORKSPACE_BYTES = 256


def attend(context: Context, query: Value, key: Value, value: Value, drop: float) -> tuple[Value, Value | None]:
    """Attention of query (tokens, heads, head_dim) over key and value (tokens, kv_heads, head_dim).

    Returns:
        The output, laid out as the query, and the probabilities where the caller gets them.
    """
    if is_eager(context.recipe):
        return _eager(context, query, key, value, drop)
    reads = tuple(context.autocast(item) for item in (query, key, value))
    run = _fused if _has_fused_kernel(context, reads[0]) else _composed
    output = run(context, *reads)
    context.tape.release(*reads)
    return output, None


def _has_fused_kernel(context: Context, query: Value) -> bool:
    """Whether the GPU's library has one: in 16 bits from Ampere on, else where no heads are grouped."""
    half = query.width < FP32_BYTES
    grouped = context.spec.heads != context.spec.kv_heads and context.mask is None
    return not grouped or (half and context.recipe.gpu_spec.compute_capability >= (8, 0))


def _score_elements(context: Context) -> int:
    return context.tokens * context.recipe.seq * context.spec.heads


def _fused(context: Context, query: Value, key: Value, value: Value) -> Value:
    """cuDNN's, flash or memory-efficient attention: keeps its inputs, its output and one fp32 sum a row.

    Its gradient works on an fp32 copy of the query's gradient and one fp32 number a row, and
    where key and value have fewer heads, on theirs for every query head. With a mask
    transformers repeats the heads itself, and torch makes a mask of numbers for each layer.
    """
    tape, masked = context.tape, context.mask is not None
    keys, values = (_repeat_heads(context, item) if masked else tape.name(item) for item in (key, value))
    bias = _additive_mask(context, query)
    rows = context.tokens * context.spec.heads
    scratch_bytes = (query.elements + rows) * FP32_BYTES + _FUSED_WORKSPACE_BYTES
    if keys.elements != query.elements:
        scratch_bytes += 2 * query.size_bytes
    output = tape.run(
        Operation(
            elements=query.elements,
            width=query.width,
            inputs=(query, keys, values),
            saves=(query, keys, values, *bias),
            saves_output=True,
            # the log-sum-exp of each row; seed and offset of dropout
            extra_saved_bytes=rows * FP32_BYTES + 2 * INDEX_BYTES,
            forward_scratch_bytes=_FUSED_WORKSPACE_BYTES,
            backward_scratch_bytes=scratch_bytes,
            scratch_role=_SCORES,
        )
    )
    tape.release(keys, values, *bias)
    return output


def _additive_mask(context: Context, query: Value) -> tuple[Value, ...]:
    """`convert_boolean_attn_mask`: zero where a token may be seen, minus infinity elsewhere."""
    if context.mask is None:
        return ()
    elements = context.tokens * context.recipe.seq
    return (context.tape.run(Operation(elements=elements, width=query.width, role=_SCORES)),)


def _repeat_heads(context: Context, item: Value) -> Value:
    """`repeat_kv`: a copy with as many heads as the query has; its gradient sums over the copies."""
    if context.spec.heads == context.spec.kv_heads:
        return context.tape.name(item)
    elements = item.elements // context.spec.kv_heads * context.spec.heads
    return context.tape.run(Operation(elements=elements, width=item.width, inputs=(item,)))


def _copy(context: Context, item: Value) -> Value:
    """`reshape` of heads apart for bmm: a copy, whose gradient is a view; of one sequence it is a view itself."""
    if context.recipe.batch == 1:
        return context.tape.name(item)
    return context.tape.run(Operation(elements=item.elements, width=item.width, passes=(item,)))


def _apart(context: Context, item: Value) -> Value:
    """Key or value for bmm: repeated heads lie apart already."""
    return _copy(context, item) if context.spec.heads == context.spec.kv_heads else context.tape.name(item)


def _score_product(context: Context, query: Value, key: Value) -> Value:
    return context.tape.run(
        Operation(
            elements=_score_elements(context),
            width=query.width,
            inputs=(query, key),
            saves=(query, key),
            role=_SCORES,
            gradient_role=_SCORES,
            scratch_role=Role.ACTIVATIONS,
        )
    )


def _weighted_sum(context: Context, probabilities: Value, value: Value) -> Value:
    """Probabilities times value, copied back to the query's layout."""
    product = context.tape.run(
        Operation(
            elements=context.tokens * context.spec.heads * context.spec.head_dim,
            width=value.width,
            inputs=(value, probabilities),
            saves=(value, probabilities),
        )
    )
    # the gradient of the transposition is a copy as well: bmm wants its heads apart
    output = context.tape.run(Operation(elements=product.elements, width=product.width, inputs=(product,)))
    context.tape.release(product)
    return output


def _softmax(context: Context, scores: Value, width: int) -> Value:
    """Keeps its output. One kernel reads fp16 and writes fp32; bf16 is cast first (`softmax` in SoftMax.cpp)."""
    fused_cast = context.recipe.compute_dtype == "float16"
    read = context.tape.name(scores) if fused_cast else _cast_scores(context, scores, width)
    sharp = context.tape.run(
        Operation(
            elements=scores.elements,
            width=width,
            inputs=(read,),
            saves_output=True,
            # softmax_backward_cuda_out multiplies gradient and output first
            backward_scratch_bytes=scores.elements * width,
            role=_SCORES,
            gradient_role=_SCORES,
        )
    )
    context.tape.release(read)
    return sharp


def _softmax_width(context: Context, scores: Value) -> int:
    """fp32, by request or by autocast; GPT-2's code asks for no dtype."""
    asks = context.spec.architecture.attention.fp32_softmax or context.half_bytes is not None
    return FP32_BYTES if asks else scores.width


def _cast_scores(context: Context, scores: Value, width: int) -> Value:
    if scores.width == width:
        return context.tape.name(scores)
    return context.tape.run(
        Operation(elements=scores.elements, width=width, inputs=(scores,), role=_SCORES, gradient_role=_SCORES)
    )


def _eager(context: Context, query: Value, key: Value, value: Value, drop: float) -> tuple[Value, Value]:
    """eager_attention_forward: scores, scaling, mask, softmax and cast, each a new tensor."""
    tape = context.tape
    keys, values = _repeat_heads(context, key), _repeat_heads(context, value)
    read_query, read_key = context.autocast(query), context.autocast(keys)
    copied, copied_key = _copy(context, read_query), _apart(context, read_key)
    product = _score_product(context, copied, copied_key)
    tape.release(copied, copied_key, read_query, read_key)
    scores = scale(context, product, role=_SCORES)
    tape.release(product)
    scores = _softcap_scores(context, scores)
    masked = _add_mask(context, scores)
    tape.release(scores)
    sharp = _softmax(context, masked, _softmax_width(context, masked))
    probabilities = _cast_scores(context, sharp, query.width)
    tape.release(sharp, masked)
    dropped = dropout(context, probabilities, drop)
    tape.release(probabilities)
    read, read_values = _cast_scores(context, dropped, context.half_bytes or dropped.width), context.autocast(values)
    copied_values = _apart(context, read_values)
    output = _weighted_sum(context, read, copied_values)
    tape.release(read, read_values, copied_values, keys, values)
    return output, dropped


def _softcap_scores(context: Context, scores: Value) -> Value:
    """Gemma 2: divide, tanh, multiply."""
    if context.spec.attention_softcap is None:
        return scores
    divided = scale(context, scores, role=_SCORES)
    context.tape.release(scores)
    bent = unary(context, divided, saves_output=True, role=_SCORES)
    context.tape.release(divided)
    capped = scale(context, bent, role=_SCORES)
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
            role=_SCORES,
            gradient_role=_SCORES,
        )
    )


def _composed(context: Context, query: Value, key: Value, value: Value) -> Value:
    """`_scaled_dot_product_attention_math`, what CUDA runs where no fused kernel groups heads: all in fp32.

    Query and key are scaled by the fourth root first; the mask is added in place, and the
    softmax is kept in full.
    """
    tape = context.tape
    wide_query, wide_key, wide_value = (context.cast(item, FP32_BYTES) for item in (query, key, value))
    scaled_query = scale(context, wide_query)
    mask = tape.run(Operation(elements=context.recipe.seq**2, width=FP32_BYTES, role=_SCORES))
    keys, values = _repeat_heads(context, wide_key), _repeat_heads(context, wide_value)
    scaled_key = renamed(context, keys, scale(context, keys))
    copied = _copy(context, scaled_query)
    scores = renamed(context, copied, _score_product(context, copied, scaled_key))
    probabilities = renamed(context, scores, _softmax(context, scores, FP32_BYTES))
    wide_output = _weighted_sum(context, probabilities, values)
    output = context.cast(wide_output, query.width)
    tape.release(wide_query, wide_key, wide_value, values, scaled_query, scaled_key, mask, probabilities, wide_output)
    return output
