"""The rotation of query and key by their positions, by a kernel."""

from collections.abc import Sequence
from dataclasses import replace

from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.kernel_call import call_kernel, kernel_memory, share_of
from ligerprof.analyzers.estimate.operators import Replay
from ligerprof.analyzers.estimate.tensors import Value
from ligerprof.kernels.selection import find_slot
from ligerprof.models.architecture import Feature
from ligerprof.models.layer_tape import function_tape


def rotate_both(context: Context, query: Value, key: Value, *, wide_tables: bool) -> Sequence[Value]:
    """Rotated query and key by the recipe's kernel: each of the two has its share of the kernel's memory.

    Args:
        wide_tables: whether cos and sin are in fp32; else they have the residual stream's dtype.
    """
    slot = find_slot(Feature.ROTARY).name
    if not context.is_fused(slot):
        return Replay(context, query, others=(key,)).outputs(function_tape("rope fp32" if wide_tables else "rope"))
    memory = kernel_memory(context, slot, query)
    # slices of one tensor are not written in place
    sliced = len(context.spec.architecture.attention.qkv) == 1
    if memory.backward_gradient_bytes:
        return context.tape.turn(query, key, in_place=not sliced)
    memory = replace(memory, output_bytes=query.size_bytes + key.size_bytes if sliced else 0)
    return [
        call_kernel(
            context,
            share_of(memory, item.elements, query.elements + key.elements),
            {"x": item},
            elements=item.elements,
            width=item.width,
        )
        for item in (query, key)
    ]
