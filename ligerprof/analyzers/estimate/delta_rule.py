"""The gated delta rule on the tape, as `torch_chunk_gated_delta_rule` of transformers computes it without `fla`."""

from dataclasses import dataclass

from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.operations import (
    add,
    in_order,
    product_of_values,
    renamed,
    scale,
    scale_rows,
    unary,
)
from ligerprof.analyzers.estimate.tensors import Value
from ligerprof.models.mixers import CHUNK_TOKENS, DeltaSizes
from ligerprof.torch_memory.dtypes import FP32_BYTES
from ligerprof.torch_memory.saved_tensors import BMM

# chunks that run one by one at each end of the loop
_CHUNKS_AT_ENDS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    """Elements of the tensors, of sequences that are padded to whole chunks.

    Attributes:
        chunks: chunks of each sequence.
        rates: one number per token and head.
        keys, values: of all heads.
        pairs: one number per pair of tokens in a chunk, and head.
        state: the state of all heads.
    """

    chunks: int
    rates: int
    keys: int
    values: int
    pairs: int
    state: int


def _sizes_of(context: Context, sizes: DeltaSizes) -> _Sizes:
    chunks = -(-context.recipe.row_tokens // CHUNK_TOKENS)
    heads = context.recipe.rows * sizes.value_heads
    rates = heads * chunks * CHUNK_TOKENS
    return _Sizes(
        chunks=chunks,
        rates=rates,
        keys=rates * sizes.key_dim,
        values=rates * sizes.value_dim,
        pairs=rates * CHUNK_TOKENS,
        state=heads * sizes.key_dim * sizes.value_dim,
    )


def gated_delta_rule(
    context: Context, heads: DeltaSizes, inputs: tuple[Value, Value, Value], decay: Value, strength: Value
) -> Value:
    """The output of all heads, (tokens, heads, elements), in the dtype of the query; the caller holds the inputs.

    Args:
        inputs: query, key and value.
    """
    query, key, value = inputs
    tape, sizes, width = context.tape, _sizes_of(context, heads), query.width
    query, key = (_repeated(context, item, heads.repeats) for item in (query, key))
    # neither a cast nor padding puts the heads of each sequence apart, so that they stay between its tokens
    between = width == FP32_BYTES and heads.value_heads > 1 and context.recipe.row_tokens % CHUNK_TOKENS == 0
    wide = [context.cast(item, FP32_BYTES) for item in (query, key, value, strength, decay)]
    tape.release(query, key)
    query, key, value, strength, decay = wide
    query = renamed(context, query, _unit_rows(context, query, heads.key_dim))
    key = renamed(context, key, _unit_rows(context, key, heads.key_dim))
    query = renamed(context, query, scale(context, query))
    padded = [
        _padded(context, item, size) for item, size in ((query, sizes.keys), (key, sizes.keys), (value, sizes.values))
    ]
    tape.release(query, key, value)
    query, key, value = padded
    rates = [_padded(context, item, sizes.rates) for item in (strength, decay)]
    tape.release(strength, decay)
    strength, decay = rates
    written, read = scale_rows(context, value, strength), scale_rows(context, key, strength)
    total = tape.run(Operation(elements=sizes.rates, width=FP32_BYTES, inputs=(decay,)))
    pairs = _pair_decays(context, total, sizes)
    # sequences and chunks lie on both sides of the heads
    copies = between and max(sizes.chunks, context.recipe.rows) > 1
    system, attention = (_times_pairs(context, item, key, pairs, copies=copies) for item in (read, query))
    decayed = _scaled_by_exp(context, read, total)
    new_values, corrections = (_solved(context, system, item, sizes) for item in (written, decayed))
    state = tape.run(Operation(elements=sizes.state, width=FP32_BYTES))
    output = tape.run(Operation(elements=sizes.values, width=FP32_BYTES))
    query = renamed(context, query, _scaled_by_exp(context, query, total))
    remaining = tape.run(Operation(elements=sizes.rates, width=FP32_BYTES, inputs=(total,)))
    key = renamed(context, key, _scaled_by_exp(context, key, remaining))
    tape.release(remaining)
    chunk_decay = unary(context, tape.slice(total, sizes.rates // CHUNK_TOKENS), saves_output=True)
    scanned = _Scanned(
        new_values=new_values,
        corrections=corrections,
        query=query,
        key=key,
        attention=attention,
        decay=chunk_decay,
        copies=between and context.recipe.rows > 1,
    )
    state, output = _scan(context, sizes, scanned, state, output)
    if sizes.rates != context.tokens * heads.value_heads:
        output = renamed(context, output, tape.slice(output, context.tokens * heads.values))
    result = context.cast(output, width)
    held = (strength, decay, value, written, read, total, pairs, system, attention, decayed, new_values, corrections)
    tape.release(*held, query, key, chunk_decay, state, output)
    # the last state
    tape.discard(state)
    return result


def _repeated(context: Context, value: Value, times: int) -> Value:
    """`repeat_interleave` of the heads: a copy, whose gradient is summed."""
    if times == 1:
        return context.tape.name(value)
    return context.tape.run(Operation(elements=times * value.elements, width=value.width, inputs=(value,)))


def _unit_rows(context: Context, value: Value, columns: int) -> Value:
    """`l2norm`: times the reciprocal root of the sum of each row's squares."""
    tape, rows = context.tape, value.elements // columns
    squares = tape.run(Operation(elements=value.elements, width=value.width, inputs=(value, value), saves=(value,)))
    total = tape.run(Operation(elements=rows, width=value.width, passes=(squares,)))
    tape.release(squares)
    shifted = renamed(context, total, tape.run(Operation(elements=rows, width=value.width, passes=(total,))))
    root = renamed(context, shifted, unary(context, shifted, saves_output=True))
    output = scale_rows(context, value, root)
    tape.release(root)
    return output


def _padded(context: Context, value: Value, elements: int) -> Value:
    """`F.pad` to whole chunks: a copy, even where nothing is missing."""
    return context.tape.run(Operation(elements=elements, width=value.width, inputs=(value,)))


def _pair_decays(context: Context, total: Value, sizes: _Sizes) -> Value:
    """`exp(total_i - total_j)` for each pair of tokens in a chunk, masked before."""
    difference = context.tape.run(
        Operation(
            elements=sizes.pairs,
            width=FP32_BYTES,
            inputs=(total, total),
            # the negated gradient, before it is summed
            reduction_scratch_bytes=sizes.pairs * FP32_BYTES,
        )
    )
    masked = renamed(context, difference, scale(context, difference))
    return renamed(context, masked, unary(context, masked, saves_output=True))


def _product(context: Context, left: Value, right: Value, elements: int) -> Value:
    """A batch of matrix products, which autocast runs in 16 bits."""
    return product_of_values(context, context.autocast(left), context.autocast(right), elements)


def _times_pairs(context: Context, left: Value, right: Value, pairs: Value, *, copies: bool) -> Value:
    """Products of each pair of tokens in a chunk, times the decay between them."""
    one, other = (in_order(context, item, copies=copies) for item in (left, right))
    product = _product(context, one, other, pairs.elements)
    context.tape.release(one, other)
    output = context.tape.run(
        Operation(
            elements=pairs.elements,
            width=pairs.width,
            inputs=(product, pairs),
            saves=(product, pairs),
            backward_scratch_bytes=pairs.size_bytes if product.width != pairs.width else 0,
        )
    )
    context.tape.release(product)
    return output


def _scaled_by_exp(context: Context, value: Value, exponents: Value) -> Value:
    """`value * exponents.exp()` with one exponent per row."""
    factors = unary(context, exponents, saves_output=True)
    output = scale_rows(context, value, factors)
    context.tape.release(factors)
    return output


def _solved(context: Context, system: Value, right: Value, sizes: _Sizes) -> Value:
    """`solve_triangular`: keeps the system and the solution."""
    return context.tape.run(
        Operation(
            elements=right.elements,
            width=FP32_BYTES,
            inputs=(system, right),
            saves=(system,),
            saves_output=True,
            # the negated product, of which one triangle is the gradient
            backward_scratch_bytes=sizes.pairs * FP32_BYTES,
        )
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scanned:
    """What the loop over chunks reads.

    Attributes:
        copies: whether the parts of query and key are copied before they are multiplied.
    """

    new_values: Value
    corrections: Value
    query: Value
    key: Value
    attention: Value
    decay: Value
    copies: bool


def _scan(context: Context, sizes: _Sizes, read: _Scanned, state: Value, output: Value) -> tuple[Value, Value]:
    """The loop over chunks; of many, those in the middle are operations that keep as much as all of them."""
    meter = context.tape.meter
    held: tuple[Value, ...] = ()
    ends = min(sizes.chunks, 2 * _CHUNKS_AT_ENDS)
    kept_bytes = 0
    for index in range(ends):
        if index == _CHUNKS_AT_ENDS and sizes.chunks > ends:
            state = _skip_chunks(context, state, read.decay, (sizes.chunks - ends) * kept_bytes)
        before_bytes = meter.total_bytes
        state, output, held = _run_chunk(context, sizes, read, state, output, held)
        kept_bytes = meter.total_bytes - before_bytes
    context.tape.release(*held)
    return state, output


def _skip_chunks(context: Context, state: Value, decay: Value, kept_bytes: int) -> Value:
    """Chunks that keep so much altogether, the state before them included."""
    tape = context.tape
    if tape.keeps_outputs_of(BMM):
        # a first pass keeps their products, which the recomputation has taken and replaced when it is through
        products = tape.run(Operation(elements=kept_bytes, width=1, inputs=(state,), always_kept=True))
        kept_bytes += products.block.size_bytes if products.block is not None else 0
        tape.release(products)
    skipped = Operation(
        elements=state.elements,
        width=state.width,
        inputs=(state,),
        saves=(state, decay),
        extra_saved_bytes=max(kept_bytes - state.size_bytes, 0) if tape.saving else 0,
    )
    return renamed(context, state, tape.run(skipped))


def _run_chunk(
    context: Context, sizes: _Sizes, read: _Scanned, state: Value, output: Value, held: tuple[Value, ...]
) -> tuple[Value, Value, tuple[Value, ...]]:
    """Read the state, write a part of `output` in place, and make the next state; `held` are variables of the loop."""
    tape, values = context.tape, sizes.values // sizes.chunks
    made = tape.slice(read.new_values, values)
    correction = tape.slice(read.corrections, sizes.keys // sizes.chunks)
    predicted = _product(context, correction, state, values)
    added = _difference(context, made, predicted)
    tape.release(made, correction, predicted, *held[:1])
    asked = tape.slice(read.query, sizes.keys // sizes.chunks)
    asked = renamed(context, asked, in_order(context, asked, copies=read.copies))
    between = _product(context, asked, state, values)
    tape.release(asked, *held[1:])
    weights = tape.slice(read.attention, sizes.pairs // sizes.chunks)
    within = _product(context, weights, added, values)
    total = add(context, between, within)
    tape.release(within, weights)
    output = renamed(context, output, _written(context, output, total, first=not held))
    tape.release(total)
    kept = _decayed_state(context, state, read.decay)
    part = tape.slice(read.key, sizes.keys // sizes.chunks)
    part = renamed(context, part, in_order(context, part, copies=read.copies))
    update = _product(context, part, added, sizes.state)
    tape.release(part)
    state = renamed(context, state, add(context, kept, update))
    tape.release(kept, update)
    return state, output, (added, between)


def _difference(context: Context, left: Value, right: Value) -> Value:
    """`left - right`: the right one receives the negated gradient, which is cast if it is narrower."""
    narrows = right.width != left.width
    return context.tape.run(
        Operation(
            elements=left.elements,
            width=left.width,
            inputs=(right,),
            passes=(left,),
            backward_scratch_bytes=left.size_bytes if narrows else 0,
        )
    )


def _written(context: Context, output: Value, part: Value, *, first: bool) -> Value:
    """`output[..., i] = part`: backward copies the gradient of all of `output` (CopySlices)."""
    return context.tape.run(
        Operation(
            elements=output.elements,
            width=output.width,
            inputs=(output, part),
            view_of=output,
            backward_scratch_bytes=part.elements * output.width + (output.size_bytes if first else 0),
        )
    )


def _decayed_state(context: Context, state: Value, decay: Value) -> Value:
    return context.tape.run(
        Operation(
            elements=state.elements,
            width=state.width,
            inputs=(state, decay),
            saves=(state, decay),
            # the gradient of the decay before it is summed
            backward_scratch_bytes=state.size_bytes,
        )
    )
