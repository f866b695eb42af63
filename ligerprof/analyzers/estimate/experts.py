"""The tokens of experts that run in turn, and experts by liger-kernel."""

from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.tensors import Value
from ligerprof.recipe.routing import tokens_per_expert
from ligerprof.torch_memory.dtypes import INT32_BYTES

# tokens of an expert that one program of liger-kernel's takes
_LIGER_TILE = 64


def routed_tokens(context: Context) -> tuple[int, ...]:
    """The tokens of each expert of the layer that has some."""
    spec = context.spec
    counts = tokens_per_expert(
        context.recipe.routing,
        sum(spec.layer_kinds.sparse[: context.layer]),
        tokens=context.tokens,
        experts=spec.experts,
        chosen=spec.chosen_experts,
    )
    return tuple(count for count in counts if count)


def fused_experts(context: Context, value: Value, scores: Value, name: str) -> Value:
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
