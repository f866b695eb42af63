"""Losses that compute the logits of a chunk of tokens at a time: TRL's, torch's and torchtitan's.

The same steps as in runs/losses/, which names the sources.
"""

import dataclasses
from functools import partial

from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.meter import Allocation
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.operations import scale, unary
from ligerprof.analyzers.estimate.recomputed import TapeWithParts
from ligerprof.analyzers.estimate.tape import Tape
from ligerprof.analyzers.estimate.tensors import Tensor, Value, Weight
from ligerprof.roles import Phase, Role
from ligerprof.torch_memory.chunked_losses import TITAN_CHUNKS, TRL_CHUNK_TOKENS, LinearCrossEntropy
from ligerprof.torch_memory.dtypes import FP32_BYTES, INDEX_BYTES, together

_LOSS = Role.CE_TEMPORARIES
# the first chunk's gradient of the weight, the sum with the second's, and an addition in place
_DISTINCT_CHUNKS = 3


def torch_linear(context: Context, hidden: Value, weight: Weight) -> Value:
    """F.linear_cross_entropy: computes both gradients in forward, which backward multiplies in place."""
    tape, recipe = context.tape, context.recipe
    rows = context.cast(hidden, weight.width)
    labels = tape.run(Operation(elements=context.tokens, width=INDEX_BYTES, role=Role.INPUTS))
    blocks = LinearCrossEntropy(
        tokens=context.tokens,
        hidden=context.spec.hidden_size,
        vocab=context.spec.vocab_size,
        width=weight.width,
        is_bfloat16=recipe.weight_dtype == "bfloat16",
        input_gradient=rows.needs_gradient,
        weight_gradient=weight.trainable,
        capability=recipe.gpu_spec.compute_capability,
    )
    loss = tape.run(
        Operation(
            elements=1,
            width=weight.width,
            early=((rows, blocks.input_gradient_bytes), (weight, blocks.weight_gradient_bytes)),
            leading_scratch=blocks.buffer_sizes,
            forward_scratch_bytes=blocks.chunk_sizes,
            # the operator returns the gradients too, and autograd makes zeros for what came back for them
            reduction_scratch_bytes=together(blocks.input_gradient_bytes, blocks.weight_gradient_bytes),
            role=_LOSS,
            scratch_role=Role.KERNEL_WORKSPACE,
            is_product=True,
            in_function=True,
        )
    )
    tape.release(labels, rows)
    return loss


def chunked_nll(context: Context, hidden: Value, weight: Weight) -> Value:
    """TRL's chunked_nll: tokens with a label first, in checkpointed chunks.

    All chunks but the first two of a backward pass are alike, so at most three are traced.
    """
    tape, recipe = context.tape, context.recipe
    assert isinstance(tape, TapeWithParts)
    width = context.spec.hidden_size
    rows = recipe.rows * (recipe.row_tokens - 1)
    # one row without its last token is contiguous
    shares = hidden if recipe.rows == 1 else None
    shifted = tape.run(
        Operation(
            elements=rows * width, width=hidden.width, inputs=(hidden,), view_of=shares, role=_LOSS, gradient_role=_LOSS
        )
    )
    # the order and the sorted labels
    kept = 2 * (rows * INDEX_BYTES,)
    sorted_rows = tape.run(
        Operation(
            elements=rows * width,
            width=hidden.width,
            inputs=(shifted,),
            extra_saved_bytes=kept,
            role=_LOSS,
            gradient_role=_LOSS,
        )
    )
    tape.release(shifted)
    size = min(TRL_CHUNK_TOKENS, rows)
    covered = max(1, min(-(-recipe.labelled_tokens // TRL_CHUNK_TOKENS), -(-rows // TRL_CHUNK_TOKENS)))
    count = min(covered, _DISTINCT_CHUNKS)
    # the head reads the weight in each chunk, and the embedding once more if both share it
    weight.uses = count + (weight is context.weights[f"{context.spec.architecture.embedding}.weight"])
    losses = []
    for _ in range(count):
        chunk = tape.slice(sorted_rows, size * width)
        losses.append(tape.checkpointed(chunk, partial(_nll_of_chunk, context, weight, chunk)))
        tape.release(chunk)
    loss = tape.run(Operation(elements=1, width=FP32_BYTES, passes=tuple(losses)))
    tape.release(*losses, sorted_rows)
    return loss


def _nll_of_chunk(context: Context, weight: Weight, hidden: Value, tape: Tape) -> Value:
    """`_chunk` of runs/losses/chunked_nll.py: the loss, and an entropy without a gradient."""
    own = dataclasses.replace(context, tape=tape, casts=[])
    read_weight: Tensor = weight
    # `weight.to(hidden.dtype).t()`, which is not a leaf: autocast does not keep its copy
    for width in (hidden.width, context.half_bytes or hidden.width):
        narrower = _cast_weight(tape, read_weight, width)
        if isinstance(read_weight, Value) and narrower is not read_weight:
            tape.release(read_weight)
        read_weight = narrower
    read = own.autocast(hidden)
    logits = _product(own, read, read_weight, hidden.elements // context.spec.hidden_size)
    tape.release(read)
    if isinstance(read_weight, Value):
        tape.release(read_weight)
    wide = upcast(own, logits)
    tape.release(logits)
    if context.spec.final_softcap is not None:
        wide = capped_in_one_line(own, wide)
    log_probabilities = log_softmax(tape, wide)
    loss = nll(tape, log_probabilities)
    _run_entropy(tape, log_probabilities)
    tape.release(wide, log_probabilities)
    return loss


def _cast_weight(tape: Tape, weight: Tensor, width: int) -> Tensor:
    if weight.width == width:
        return weight
    return tape.run(
        Operation(
            elements=weight.elements,
            width=width,
            inputs=(weight,),
            role=Role.WEIGHT_CASTS,
            gradient_role=Role.GRADIENTS,
            gradient_is_view=True,
        )
    )


def _product(context: Context, read: Value, weight: Tensor, rows: int) -> Value:
    """`read @ weight.t()` of two matrices; the gradient of the weight is a view."""
    saves = ((read,) if weight.needs_gradient else ()) + ((weight,) if read.needs_gradient else ())
    return context.tape.run(
        Operation(
            elements=rows * context.spec.vocab_size,
            width=read.width,
            inputs=(weight, read),
            saves=saves,
            role=Role.LOGITS,
            gradient_role=_LOSS,
            gradient_is_view=True,
            is_product=True,
        )
    )


def upcast(context: Context, logits: Value) -> Value:
    """`logits.float()`: a second [T, V] tensor, or the same one if it is fp32."""
    if logits.width == FP32_BYTES:
        return context.tape.name(logits)
    return context.tape.run(
        Operation(elements=logits.elements, width=FP32_BYTES, inputs=(logits,), role=Role.LOGITS, gradient_role=_LOSS)
    )


def capped_in_one_line(context: Context, logits: Value) -> Value:
    """`logits = cap * tanh(logits / cap)`, which holds the uncapped logits until the product is there."""
    tape = context.tape
    divided = scale(context, logits, role=Role.LOGITS)
    bent = unary(context, divided, saves_output=True, role=Role.LOGITS)
    tape.release(divided)
    capped = scale(context, bent, role=Role.LOGITS)
    tape.release(bent, logits)
    return capped


def log_softmax(tape: Tape, logits: Value) -> Value:
    """`log_softmax` of fp32 logits, which keeps its output."""
    return tape.run(
        Operation(
            elements=logits.elements,
            width=FP32_BYTES,
            inputs=(logits,),
            saves_output=True,
            role=_LOSS,
            gradient_role=_LOSS,
        )
    )


def nll(tape: Tape, log_probabilities: Value, *labels: Value) -> Value:
    """`nll_loss`, which keeps what it reads, and the sum of the labels' weights."""
    return tape.run(
        Operation(
            elements=1,
            width=FP32_BYTES,
            inputs=(log_probabilities,),
            saves=(log_probabilities, *labels),
            extra_saved_bytes=FP32_BYTES,
            role=_LOSS,
        )
    )


def _run_entropy(tape: Tape, log_probabilities: Value) -> None:
    """`((p.exp() * p).sum(-1) * has_label).sum()`, without backward; what it saves decides where recomputation ends."""
    raised = tape.run(_elementwise(log_probabilities))
    product = tape.run(_elementwise(log_probabilities, raised))
    sums = tape.run(Operation(elements=1, width=FP32_BYTES, inputs=(product,)))
    tape.release(product, raised)
    tape.release(sums, tape.run(Operation(elements=1, width=FP32_BYTES, inputs=(sums,), saves=(sums,))))


def _elementwise(*factors: Value) -> Operation:
    first = factors[0]
    return Operation(elements=first.elements, width=first.width, inputs=factors, saves=factors, role=_LOSS)


def titan_chunked(context: Context, hidden: Value, weight: Weight) -> Value:
    """The chunked loss of torchtitan: backward of each chunk within forward; gradients of hidden states in fp32."""
    tape, meter = context.tape, context.tape.meter
    # each chunk adds to the gradient on its own
    weight.uses = 1
    labels = tape.run(Operation(elements=context.tokens, width=INDEX_BYTES, role=Role.INPUTS))
    total = meter.take(hidden.elements * FP32_BYTES, _LOSS)
    # autocast keeps copies of trainable weights alone
    read_weight = context.autocast_weight(weight) if weight.trainable else weight
    logits: Allocation | None = None
    for _ in range(TITAN_CHUNKS):
        logits = _titan_chunk(context, hidden, weight, read_weight, logits)
    if logits is not None:
        meter.drop(logits)
    keeps_total = hidden.width == FP32_BYTES
    if keeps_total:
        meter.drop(total)
    loss = tape.run(
        Operation(elements=1, width=FP32_BYTES, early=((hidden, hidden.size_bytes),), in_function=True, role=_LOSS)
    )
    if not keeps_total:
        meter.drop(total)
    tape.release(labels)
    return loss


def _titan_chunk(
    context: Context, hidden: Value, weight: Weight, read_weight: Tensor, before: Allocation | None
) -> Allocation:
    """Forward and backward of a chunk, while the logits of the one before are alive; returns this chunk's logits."""
    meter = context.tape.meter
    tape = Tape(meter)
    rows = context.tokens // TITAN_CHUNKS
    # detached, and so a leaf, whose cast autocast keeps
    chunk = Value(hidden.elements // TITAN_CHUNKS, hidden.width, hidden.needs_gradient, hidden.block)
    own = dataclasses.replace(context, tape=tape, casts=[], leaf=chunk, leaf_cast=None)
    shared: Tensor = own.autocast_weight(weight) if read_weight is weight else weight
    if isinstance(read_weight, Value):
        shared = tape.run(
            Operation(
                elements=weight.elements,
                width=read_weight.width,
                inputs=(weight,),
                view_of=read_weight,
                gradient_role=Role.GRADIENTS,
            )
        )
    read = own.autocast(chunk)
    logits = _product(own, read, shared, rows)
    tape.release(read)
    if isinstance(shared, Value):
        tape.release(shared)
    if before is not None:
        meter.drop(before)
    wide = upcast(own, logits)
    log_probabilities = log_softmax(tape, wide)
    loss = nll(tape, log_probabilities)
    tape.release(log_probabilities, wide)
    with meter.in_thread(Phase.BACKWARD):
        gradient = tape.backward(loss, meter.take(FP32_BYTES, Role.OTHER), chunk)
    if gradient is not None:
        if chunk.width != FP32_BYTES:
            meter.touch(chunk.elements * FP32_BYTES, Role.ACTIVATIONS)
        meter.drop(gradient)
    tape.release(loss)
    for cast in own.casts:
        context.casts.append(context.tape.name(cast))
        tape.release(cast)
    return tape.hand_over(logits)
