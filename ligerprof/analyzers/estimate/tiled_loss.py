"""TRL's loss in tiles of logits: tokens with a label, an autograd function over tiles, and statistics per token."""

from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.tensors import Value, Weight
from ligerprof.roles import Role
from ligerprof.torch_memory.chunked_losses import TiledLogProbabilities
from ligerprof.torch_memory.dtypes import FP32_BYTES, INDEX_BYTES

_LOSS = Role.CE_TEMPORARIES
_WORKSPACE = Role.KERNEL_WORKSPACE


def trl_tiled(context: Context, hidden: Value, weight: Weight) -> Value:
    """`trl-tiled` of runs/losses/, which cites TRL."""
    tape, recipe = context.tape, context.recipe
    width, tokens = context.spec.hidden_size, recipe.labelled_tokens
    places = recipe.rows * (recipe.row_tokens - 1)
    # rows and columns of the labelled places
    indices = tape.run(Operation(elements=2 * tokens, width=INDEX_BYTES, role=_LOSS))
    # without the last place of each row, the gradient is first as large as the other places
    sliced = tape.slice(hidden, places * width)
    scored = tape.run(
        Operation(
            elements=tokens * width,
            width=hidden.width,
            inputs=(sliced,),
            saves=(indices,),
            role=_LOSS,
            gradient_role=_WORKSPACE,
        )
    )
    tape.release(sliced)
    labels = tape.run(Operation(elements=tokens, width=INDEX_BYTES, role=Role.INPUTS))
    blocks = TiledLogProbabilities(
        tokens=tokens,
        hidden=width,
        vocab=context.spec.vocab_size,
        hidden_width=hidden.width,
        weight_width=weight.width,
        width=context.half_bytes or hidden.width,
        input_gradient=scored.needs_gradient,
        weight_gradient=weight.needs_gradient,
    )
    before_results, after_results = blocks.forward_scratch
    before_gradients, after_gradients = blocks.backward_scratch
    probabilities = tape.run(
        Operation(
            elements=tokens,
            width=FP32_BYTES,
            inputs=(scored, weight),
            saves=(scored, labels),
            # the normalizer and the entropy
            extra_saved_bytes=2 * (tokens * FP32_BYTES,),
            leading_scratch=before_results,
            forward_scratch_bytes=after_results,
            leading_gradient_scratch=before_gradients,
            backward_scratch_bytes=after_gradients,
            role=_LOSS,
            scratch_role=_WORKSPACE,
            is_product=True,
            in_function=True,
        )
    )
    tape.release(labels, scored, indices)
    scattered = tape.run(
        Operation(
            elements=places,
            width=FP32_BYTES,
            inputs=(probabilities,),
            # where there is a label
            extra_saved_bytes=places,
            role=_LOSS,
        )
    )
    tape.release(probabilities)
    loss = tape.run(Operation(elements=1, width=FP32_BYTES, inputs=(scattered,)))
    tape.release(scattered)
    return loss
