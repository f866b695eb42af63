"""The rotation of query and key by their positions, by a kernel."""

from dataclasses import replace

from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.kernel_call import call_kernel, kernel_memory, share_of
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.operations import add, renamed
from ligerprof.analyzers.estimate.tensors import Value
from ligerprof.kernels.selection import find_slot
from ligerprof.models.architecture import Feature
from ligerprof.torch_memory.dtypes import FP32_BYTES, together


def rotate_both(context: Context, query: Value, key: Value, *, wide_tables: bool) -> tuple[Value, Value]:
    """Rotated query and key by the recipe's kernel: each of the two has its share of the kernel's memory.

    Args:
        wide_tables: whether cos and sin are in fp32; else they have the residual stream's dtype.
    """
    slot = find_slot(Feature.ROTARY).name
    if not context.is_fused(slot):
        # FSDP2's mixed precision casts the inputs of every layer
        table_bytes = FP32_BYTES if wide_tables and not context.recipe.casts_gathered else context.stream_bytes
        return _rotate_by_reference(context, query, key, table_bytes)
    memory = kernel_memory(context, slot, query)
    # slices of one tensor are not written in place
    sliced = len(context.spec.architecture.attention.qkv) == 1
    if memory.backward_gradient_bytes:
        rotated, turned_key = context.tape.turn(query, key, in_place=not sliced)
        return rotated, turned_key
    memory = replace(memory, output_bytes=query.size_bytes + key.size_bytes if sliced else 0)
    turned = [
        call_kernel(
            context,
            share_of(memory, item.elements, query.elements + key.elements),
            {"x": item},
            elements=item.elements,
            width=item.width,
        )
        for item in (query, key)
    ]
    return turned[0], turned[1]


def _rotate_by_reference(context: Context, query: Value, key: Value, table_bytes: int) -> tuple[Value, Value]:
    """kernels/rope/reference.py: halves are chunks, whose gradients are joined, and each sum is cast back."""

    def rotate(value: Value) -> Value:
        wide = _turn(context, value, table_bytes)
        return renamed(context, wide, context.cast(wide, value.width))

    return rotate(query), rotate(key)


def _turn(context: Context, value: Value, table_bytes: int) -> Value:
    """`value * cos + rotate_half(value) * sin`."""
    tape = context.tape
    upright = _times_table(context, value, table_bytes)
    half_bytes = value.size_bytes // 2
    turned = tape.run(
        Operation(
            elements=value.elements,
            width=value.width,
            inputs=(value,),
            # the negated half
            leading_scratch=(half_bytes,),
            leading_gradient_scratch=(half_bytes,),
            backward_scratch_bytes=(-half_bytes, *together(half_bytes)),
        )
    )
    sideways = _times_table(context, turned, table_bytes)
    tape.release(turned)
    output = add(context, upright, sideways)
    tape.release(upright, sideways)
    return output


def _times_table(context: Context, value: Value, table_bytes: int) -> Value:
    """Multiply by cos or sin; with wider tables, the gradient is computed in their dtype and cast."""
    width = max(value.width, table_bytes)
    return context.tape.run(
        Operation(
            elements=value.elements,
            width=width,
            inputs=(value,),
            backward_scratch_bytes=value.elements * width if width != value.width else 0,
        )
    )
