"""Experts by other code than the grouped products on tapes: in turn, or by liger-kernel."""

from collections.abc import Sequence

from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.expert_loop import experts_in_turn
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.tensors import Value
from ligerprof.torch_memory.dtypes import INT32_BYTES

# tokens of an expert that one program of liger-kernel's takes
_LIGER_TILE = 64


def run_experts(context: Context, value: Value, scores: Value, name: str, *, shared: bool) -> Sequence[Value]:
    """The experts' outputs, weighted and added up for each token; nothing where they run as grouped products.

    Args:
        shared: whether another module has read the same view of the tokens before.
    """
    if any(kernel.fuses_experts(context.spec) for kernel in context.kernels.values()):
        return [_fused(context, value, scores, name)]
    if not context.recipe.runs_experts_in_turn:
        return ()
    if not shared:
        # their gradients add up in a view of the tokens, before those of a shared expert or the residual join them
        value = context.tape.run(Operation(elements=value.elements, width=value.width, passes=(value,), view_of=value))
    total = experts_in_turn(context, value, scores, name)
    if not shared:
        context.tape.release(value)
    return [total]


def _fused(context: Context, value: Value, scores: Value, name: str) -> Value:
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
