"""The rotation of query and key by their positions, as the architecture writes it or by a kernel."""

from dataclasses import replace

from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.kernel_call import call_kernel, kernel_memory, share_of
from ligerprof.analyzers.estimate.model import has_fp32_tables
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.operations import add, renamed
from ligerprof.analyzers.estimate.tensors import Value
from ligerprof.kernels.slots import find_slot
from ligerprof.models.architecture import Feature, Rotary
from ligerprof.torch_memory.dtypes import FP32_BYTES, together


def rotate_both(context: Context, query: Value, key: Value) -> tuple[Value, ...]:
    """apply_rotary_pos_emb, or the kernel in its place: each of the two has its share of the kernel's memory.

    Returns:
        The rotated query and key, and what the attention's variables hold besides.
    """
    slot = find_slot(Feature.ROTARY).name
    if not context.is_fused(slot):
        return _rotate_by_reference(context, query, key) if slot in context.kernels else _rotate(context, query, key)
    memory = kernel_memory(context, slot, query)
    if len(context.spec.architecture.attention.qkv) == 1:
        # slices of one tensor are not written in place
        memory = replace(memory, output_bytes=query.size_bytes + key.size_bytes)
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


def _rotate_by_reference(context: Context, query: Value, key: Value) -> tuple[Value, Value]:
    """kernels/rope/reference.py: halves are chunks, whose gradients are joined, and each sum is cast back."""
    tables = _Tables(_table_bytes(context))

    def rotate(value: Value) -> Value:
        wide = _turn(context, value, tables, turn_back_bytes=value.size_bytes // 2)
        return renamed(context, wide, context.cast(wide, value.width))

    return rotate(query), rotate(key)


def rotate_latents(context: Context, query: Value, key: Value) -> tuple[Value, Value]:
    """The rotated parts of query and key; all heads share the key's."""
    row = context.spec.architecture.attention.rotary
    assert row is not None
    if row.complex_products is not None:
        return _turn_complex(context, query, key)
    tables, tape = _Tables(_table_bytes(context)), context.tape
    if row.pairs_when is None or not context.spec.setting(row.pairs_when):
        return _turn(context, query, tables), _turn(context, key, tables)
    parts = [(tape.slice(item, item.elements // 2), tape.slice(item, item.elements // 2)) for item in (query, key)]
    turned = [_turn_parts(context, *part, tables) for part in parts]
    tape.release(*parts[0], *parts[1])
    return turned[0], turned[1]


def _turn_complex(context: Context, query: Value, key: Value) -> tuple[Value, Value]:
    """`apply_rotary_emb`: pairs of neighbors in fp32, as complex numbers, times the decoder's table."""
    row, tape = context.spec.architecture.attention.rotary, context.tape
    wide = [context.cast(item, FP32_BYTES) for item in (query, key)]
    turned: list[Value] = []
    # backward multiplies by the conjugate, a copy of the table
    conjugate_bytes = context.recipe.row_tokens * context.spec.rotary_dim * FP32_BYTES
    keeps_products, products = row is not None and row.complex_products == "both", []
    for item in wide:
        product = tape.run(
            Operation(elements=item.elements, width=FP32_BYTES, inputs=(item,), backward_scratch_bytes=conjugate_bytes)
        )
        products.append(product)
        if not keeps_products:
            turned.append(context.cast(product, query.width))
            tape.release(product)
    if keeps_products:
        turned = [context.cast(product, query.width) for product in products]
        tape.release(*products)
    tape.release(*wide)
    return turned[0], turned[1]


class _Tables:
    """The tables cos and sin that a layer reads.

    Attributes:
        width: bytes per element.
        expanded: the layer's own tensors, if it makes them from halves of the decoder's.
    """

    def __init__(self, width: int, expanded: tuple[Value, ...] = ()) -> None:
        self.width, self.expanded = width, expanded


def _table_bytes(context: Context) -> int:
    return FP32_BYTES if has_fp32_tables(context.recipe) else context.stream_bytes


def _rotate(context: Context, query: Value, key: Value) -> tuple[Value, ...]:
    """apply_rotary_pos_emb as the architecture writes it."""
    row = context.spec.architecture.attention.rotary
    assert row is not None
    if row.complex_products is not None:
        return _turn_complex(context, query, key)
    tape, tables = context.tape, _make_tables(context, row)
    if row.halves:
        turned = [_turn_halves(context, item, tables) for item in (query, key)]
    elif row.share is not None:
        turned = _rotate_parts(context, row, query, key, tables)
    else:
        read = [context.cast(item, FP32_BYTES) if row.upcasts == "first" else tape.name(item) for item in (query, key)]
        turned = [_turn(context, item, tables, upcasts=row.upcasts == "factors") for item in read]
        if row.upcasts is not None or has_fp32_tables(context.recipe):
            cast = [context.cast(wide, query.width) for wide in turned]
            tape.release(*turned)
            turned = cast
        tape.release(*read)
    tape.release(*tables.expanded)
    return tuple(turned)


def _make_tables(context: Context, row: Rotary) -> _Tables:
    width = _table_bytes(context)
    if not row.expands_tables:
        return _Tables(width)
    table = Operation(elements=context.recipe.row_tokens * context.spec.rotary_dim, width=width)
    return _Tables(width, (context.tape.run(table), context.tape.run(table)))


def _rotate_parts(context: Context, row: Rotary, query: Value, key: Value, tables: _Tables) -> list[Value]:
    """Rotate a part of each head, and concatenate it with the rest; then the parts that variables hold."""
    parts = [_cut_rotated(context, item) for item in (query, key)]
    if not row.joins_last:
        return [_join_rotated(context, _turn(context, part, tables), part, rest) for part, rest in parts]
    turned = [_turn(context, part, tables) for part, _ in parts]
    held = (*turned, *(rest for _, rest in parts)) if row.holds_parts else ()
    for item in held:
        context.tape.name(item)
    return [*(_join_rotated(context, item, *part) for item, part in zip(turned, parts, strict=True)), *held]


def _cut_rotated(context: Context, value: Value) -> tuple[Value, Value]:
    """The rotated part of each head (`value` itself if all of it is rotated), and the rest."""
    tape, spec = context.tape, context.spec
    elements = value.elements // spec.head_dim * spec.rotary_dim
    rotated = tape.name(value) if elements == value.elements else tape.slice(value, elements)
    return rotated, tape.slice(value, value.elements - elements)


def _join_rotated(context: Context, turned: Value, part: Value, rest: Value) -> Value:
    """Concatenate the rotated part and the rest; their gradients are views of its gradient."""
    joined = context.tape.run(
        Operation(elements=turned.elements + rest.elements, width=turned.width, passes=(turned, rest))
    )
    context.tape.release(turned, part, rest)
    return joined


def _turn(
    context: Context, value: Value, tables: _Tables, *, upcasts: bool = False, turn_back_bytes: int | None = None
) -> Value:
    """`value * cos + rotate_half(value) * sin`; the tables are fp32 or have the residual stream's dtype.

    Args:
        upcasts: whether each factor of a table is cast to fp32 first.
        turn_back_bytes: what rotate_half's backward holds next to its result: by default a padded half of it.
    """
    tape = context.tape
    upright = _times_table(context, value, tables, 0, upcasts=upcasts)
    half_bytes = value.size_bytes // 2
    padded_bytes = value.size_bytes if turn_back_bytes is None else turn_back_bytes
    turned = tape.run(
        Operation(
            elements=value.elements,
            width=value.width,
            inputs=(value,),
            # the negated half
            leading_scratch=(half_bytes,),
            leading_gradient_scratch=(half_bytes,),
            backward_scratch_bytes=(-half_bytes, *together(padded_bytes)),
        )
    )
    sideways = _times_table(context, turned, tables, 1, upcasts=upcasts)
    tape.release(turned)
    output = add(context, upright, sideways)
    tape.release(upright, sideways)
    return output


def _turn_halves(context: Context, value: Value, tables: _Tables) -> Value:
    """GPT-OSS's _apply_rotary_emb: both halves times both tables, and the two sums concatenated."""
    first, second = context.tape.split(value, 2)
    joined = _turn_parts(context, first, second, tables)
    context.tape.release(first, second)
    return joined


def _turn_parts(context: Context, one: Value, other: Value, tables: _Tables) -> Value:
    """`cat((one * cos - other * sin, other * cos + one * sin))`."""
    tape, turned = context.tape, []
    for first, second in ((one, other), (other, one)):
        upright = _times_table(context, first, tables, 0, upcasts=False)
        sideways = _times_table(context, second, tables, 1, upcasts=False)
        turned.append(add(context, upright, sideways))
        tape.release(upright, sideways)
    joined = tape.run(
        Operation(elements=one.elements + other.elements, width=turned[0].width, passes=(turned[0], turned[1]))
    )
    tape.release(*turned)
    return joined


def _times_table(context: Context, value: Value, tables: _Tables, which: int, *, upcasts: bool) -> Value:
    """Multiply by cos or sin; with wider tables, the gradient is computed in their dtype and cast."""
    read = context.cast(value, FP32_BYTES) if upcasts else context.tape.name(value)
    width = max(read.width, tables.width)
    output = context.tape.run(
        Operation(
            elements=read.elements,
            width=width,
            inputs=(read,),
            saves=tables.expanded[which : which + 1],
            backward_scratch_bytes=read.elements * width if width != read.width else 0,
        )
    )
    context.tape.release(read)
    return output
