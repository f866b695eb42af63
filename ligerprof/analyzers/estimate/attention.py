"""Attention as transformers calls it: scaled_dot_product_attention, or the recorded steps of eager attention."""

from collections.abc import Iterable, Sequence
from typing import Any

from ligerprof.analyzers.estimate.context import Context, is_eager
from ligerprof.analyzers.estimate.operators import Replay
from ligerprof.analyzers.estimate.scaled_dot_product import SCORES, scaled_dot_product
from ligerprof.analyzers.estimate.tensors import Tensor, Value
from ligerprof.models.layer_tape import Step, attention_tape


def attend(context: Context, query: Value, key: Value, value: Value, *, apart: bool) -> tuple[Value, Value | None]:
    """Attention of query (tokens, heads, head_dim) over key and value (tokens, kv_heads, head_dim).

    Args:
        apart: whether the heads of query and key lie apart.

    Returns:
        The output, with its tokens in order, and the probabilities where the caller gets them.
    """
    if not is_eager(context.recipe):
        return scaled_dot_product(context, query, key, value, apart=apart), None
    row, mask = context.spec.architecture, context.mask
    assert mask is not None
    replay = _EagerReplay(
        context, query, f"{row.layers}.{context.layer}.{row.attention.name}", others=(key, value, mask)
    )
    output, probabilities = replay.outputs(attention_tape(context.spec, context.recipe.rows, apart=apart))
    context.tape.role = None
    return output, probabilities


class _EagerReplay(Replay):
    """Runs the steps of eager attention; what is as large as the scores has their role, and so have its gradients."""

    def replaced(
        self, step: Step, values: Sequence[Any], _following: Iterable[Step]
    ) -> tuple[Sequence[Tensor | None], int]:
        """Nothing, after a look at what the step makes."""
        if step[0] == "product of values":
            are_scores = step[3][-2:] == ["tokens", "tokens"]
        else:
            are_scores = any(isinstance(item, Value) and item.gradient_role is SCORES for item in values)
        self.tape.role = SCORES if are_scores else None
        return (), 0
