"""The scan of a Mamba-2 mixer on the tape, as `mamba2_chunk_scan` of transformers 5.23 computes it in chunks."""

from dataclasses import dataclass

from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.operations import (
    add,
    in_order,
    multiply_wide,
    product_of_values,
    renamed,
    saved_factors,
    scale_rows,
    unary,
)
from ligerprof.analyzers.estimate.tensors import Value
from ligerprof.models.mixers import StateSpaceSizes
from ligerprof.torch_memory.dtypes import FP32_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class _Elements:
    """Elements of the tensors, of sequences that are padded to whole chunks.

    Attributes:
        steps: one number per token and head.
        values: of all heads.
        states: inputs or outputs of all states of all heads.
        pairs: one number per pair of tokens in a chunk, and head.
        kept: the state of all heads at the end of each chunk.
        first: the state of all heads before the first chunk.
        chunk_ends: one number per chunk and head, and one per head before the first chunk.
        chunk_pairs: one number per pair of these and head.
        mask, chunk_mask: one number per pair of tokens in a chunk, or of chunks.
    """

    steps: int
    values: int
    states: int
    pairs: int
    kept: int
    first: int
    chunk_ends: int
    chunk_pairs: int
    mask: int
    chunk_mask: int


def _elements(context: Context, sizes: StateSpaceSizes) -> _Elements:
    chunks = -(-context.recipe.row_tokens // sizes.chunk)
    heads = context.recipe.rows * sizes.heads
    steps = heads * chunks * sizes.chunk
    first = heads * sizes.head_dim * sizes.state
    return _Elements(
        steps=steps,
        values=steps * sizes.head_dim,
        states=steps * sizes.state,
        pairs=steps * sizes.chunk,
        kept=first * chunks,
        first=first,
        chunk_ends=heads * (chunks + 1),
        chunk_pairs=heads * (chunks + 1) ** 2,
        mask=sizes.chunk**2,
        chunk_mask=(chunks + 1) ** 2,
    )


def scan_states(
    context: Context, sizes: StateSpaceSizes, inputs: tuple[Value, Value, Value], steps: Value, rates: Value, name: str
) -> Value:
    """`mamba2_chunk_scan`, in fp32; the caller holds the inputs: values, and what goes into and out of the states."""
    tape, counts = context.tape, _elements(context, sizes)
    lengths = _step_lengths(context, steps, name)
    values = context.cast(inputs[0], FP32_BYTES)
    into, out_of = (_for_each_head(context, item, sizes) for item in inputs[1:])
    passed = _skipped(context, values, counts, name)
    values = renamed(context, values, _times_steps(context, values, lengths))
    decay = _decay(context, rates, lengths)
    padded = [
        _padded(context, item, size)
        for item, size in (
            (values, counts.values),
            (decay, counts.steps),
            (into, counts.states),
            (out_of, counts.states),
        )
    ]
    tape.release(values, decay, into, out_of)
    values, decay, into, out_of = padded
    copies = _copies(context, sizes)
    total = tape.run(
        Operation(elements=counts.steps, width=FP32_BYTES, inputs=(decay,), backward_scratch_bytes=2 * decay.size_bytes)
    )
    within = _pair_decays(context, decay, counts.pairs, counts.mask)
    scores = _contracted(context, out_of, into, counts.pairs, copies=(copies.tokens, copies.tokens))
    weights = multiply_wide(context, scores, within)
    inside = _contracted(
        context, weights, values, counts.values, copies=(False, copies.values), gradient_copy=copies.tokens
    )
    remaining = _exp_of_difference(context, total)
    fading = scale_rows(context, into, remaining)
    tape.release(remaining)
    states = _contracted(context, values, fading, counts.kept, copies=(copies.values, copies.tokens))
    before = tape.run(Operation(elements=counts.first, width=states.width))
    joined = tape.run(Operation(elements=counts.first + counts.kept, width=states.width, passes=(states,)))
    states = renamed(context, states, joined)
    of_chunks = _chunk_decays(context, total, counts)
    moved = _contracted(
        context,
        of_chunks,
        states,
        counts.first + counts.kept,
        copies=(False, copies.joined),
        gradient_copy=copies.joined,
    )
    tape.release(states)
    states = tape.slice(moved, counts.kept)
    since = unary(context, total, saves_output=True)
    read = _contracted(
        context, out_of, states, counts.values, copies=(copies.tokens, copies.states), gradient_copy=copies.tokens
    )
    outside = scale_rows(context, read, since)
    result = add(context, inside, outside)
    result = renamed(context, result, in_order(context, result, copies=sizes.heads > 1))
    result = renamed(context, result, add(context, result, passed))
    if counts.steps != context.tokens * sizes.heads:
        result = renamed(context, result, tape.slice(result, context.tokens * sizes.inner))
    tape.release(lengths, values, decay, into, out_of, passed, total, within, scores, weights, inside, fading)
    tape.release(before, of_chunks, moved, states, since, read, outside)
    return result


@dataclass(frozen=True, kw_only=True, slots=True)
class _Copies:
    """Which operands `einsum` copies: those whose batch dimensions do not lie next to each other.

    Attributes:
        tokens: tensors in the order sequence, token, head.
        values: the values, whose tokens lie next to each other, as the convolution leaves them.
        joined: the states of all chunks, and the one before the first.
        states: the states before each chunk.
    """

    tokens: bool
    values: bool
    joined: bool
    states: bool


def _copies(context: Context, sizes: StateSpaceSizes) -> _Copies:
    rows, chunks = context.recipe.rows, -(-context.recipe.row_tokens // sizes.chunk)
    several, batches = sizes.heads > 1, rows > 1 or sizes.heads > 1
    tokens = several and rows * chunks > 1
    return _Copies(
        tokens=tokens, values=batches and chunks > 1, joined=several and rows > 1, states=batches and chunks > 1
    )


def _step_lengths(context: Context, steps: Value, name: str) -> Value:
    """`clamp(softplus(steps + dt_bias))`."""
    tape, shift = context.tape, context.weights[f"{name}.dt_bias"]
    bias = context.cast_weight(shift, steps.width)
    shifted = tape.run(Operation(elements=steps.elements, width=steps.width, inputs=(bias,), passes=(steps,)))
    if isinstance(bias, Value):
        tape.release(bias)
    soft = renamed(context, shifted, unary(context, shifted))
    return renamed(context, soft, unary(context, soft))


def _for_each_head(context: Context, value: Value, sizes: StateSpaceSizes) -> Value:
    """`value.float().repeat_interleave(...)`: a copy, whose gradient is summed."""
    wide = context.cast(value, FP32_BYTES)
    elements = wide.elements * sizes.heads // sizes.groups
    return renamed(context, wide, context.tape.run(Operation(elements=elements, width=FP32_BYTES, inputs=(wide,))))


def _skipped(context: Context, values: Value, counts: _Elements, name: str) -> Value:
    """The padded values times a weight per head."""
    tape, weight = context.tape, context.weights[f"{name}.D"]
    padded = _padded(context, values, counts.values)
    output = tape.run(
        Operation(
            elements=counts.values,
            width=FP32_BYTES,
            inputs=(padded, weight),
            saves=(padded, weight) if weight.needs_gradient else (weight,),
            # gradient times values, before it is summed for each head
            backward_scratch_bytes=padded.size_bytes if weight.needs_gradient else 0,
        )
    )
    return renamed(context, padded, output)


def _times_steps(context: Context, values: Value, lengths: Value) -> Value:
    """`values * lengths[..., None].float()`."""
    wide = context.cast(lengths, FP32_BYTES)
    output = scale_rows(context, values, wide)
    context.tape.release(wide)
    return output


def _decay(context: Context, rates: Value, lengths: Value) -> Value:
    """`rates * lengths.float()`, one rate per head."""
    wide = context.cast(lengths, FP32_BYTES)
    output = context.tape.run(
        Operation(
            elements=wide.elements,
            width=FP32_BYTES,
            inputs=(rates, wide),
            saves=saved_factors(rates, wide),
            backward_scratch_bytes=wide.size_bytes if rates.needs_gradient else 0,
        )
    )
    context.tape.release(wide)
    return output


def _padded(context: Context, value: Value, elements: int) -> Value:
    """`F.pad` to whole chunks: a copy, even where nothing is missing."""
    return context.tape.run(Operation(elements=elements, width=value.width, inputs=(value,)))


def _pair_decays(context: Context, decay: Value, pairs: int, mask: int) -> Value:
    """`exp(segment_sum(decay))`: sums over the tokens between each pair, masked above the diagonal."""
    tape = context.tape
    spread = _masked(context, decay, pairs, mask)
    total = tape.run(
        Operation(elements=pairs, width=FP32_BYTES, inputs=(spread,), backward_scratch_bytes=2 * pairs * FP32_BYTES)
    )
    masked = renamed(context, total, _masked(context, total, pairs, mask))
    tape.release(spread)
    return renamed(context, masked, unary(context, masked, saves_output=True))


def _masked(context: Context, value: Value, elements: int, mask: int) -> Value:
    """`masked_fill` of `value`, repeated to so many elements, by an inverted mask."""
    repeats = value.elements != elements
    return context.tape.run(
        Operation(
            elements=elements,
            width=FP32_BYTES,
            inputs=(value,),
            extra_saved_bytes=mask,
            # the masked gradient, before it is summed
            backward_scratch_bytes=elements * FP32_BYTES if repeats else 0,
        )
    )


def _chunk_decays(context: Context, total: Value, counts: _Elements) -> Value:
    """The decay between the ends of each pair of chunks."""
    last = context.tape.slice(total, total.elements)
    padded = renamed(
        context, last, context.tape.run(Operation(elements=counts.chunk_ends, width=FP32_BYTES, inputs=(last,)))
    )
    return renamed(context, padded, _pair_decays(context, padded, counts.chunk_pairs, counts.chunk_mask))


def _exp_of_difference(context: Context, total: Value) -> Value:
    """`exp(total[..., -1:] - total)`."""
    difference = context.tape.run(Operation(elements=total.elements, width=FP32_BYTES, inputs=(total,)))
    return renamed(context, difference, unary(context, difference, saves_output=True))


def _contracted(
    context: Context,
    left: Value,
    right: Value,
    elements: int,
    *,
    copies: tuple[bool, bool],
    gradient_copy: bool = False,
) -> Value:
    """`einsum` of two tensors: a batch of matrix products, which autocast runs in 16 bits.

    Args:
        copies: which of the two is copied, for its heads lie between its tokens.
        gradient_copy: whether the gradient of the product is.
    """
    tape = context.tape
    narrow = [context.autocast(item) for item in (left, right)]
    first, second = (in_order(context, item, copies=copy) for item, copy in zip(narrow, copies, strict=True))
    tape.release(*narrow)
    product = product_of_values(context, first, second, elements)
    if not gradient_copy:
        return product
    return renamed(
        context,
        product,
        tape.run(Operation(elements=elements, width=product.width, inputs=(product,), view_of=product)),
    )
