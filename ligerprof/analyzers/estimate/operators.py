"""Recorded operators of a module, carried out on a tape: which tensors they make, keep and read."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice, zip_longest
from math import prod
from typing import Any

from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.operations import (
    add,
    add_columns,
    batch_product,
    convolve,
    dropout,
    grouped_product,
    in_order,
    layer_norm,
    linear,
    multiply,
    product_of_values,
    scale,
    scale_columns,
    scale_rows,
    soften,
    square,
    turned,
    unary,
)
from ligerprof.analyzers.estimate.tensors import Tensor, Value, Weight
from ligerprof.models.config_keys import Number
from ligerprof.models.layer_tape import Operand, Step, sizes_of
from ligerprof.roles import Role
from ligerprof.torch_memory.dtypes import DTYPE_BYTES, FP32_BYTES, INDEX_BYTES, INT32_BYTES
from ligerprof.torch_memory.saved_tensors import BMM
from ligerprof.torch_memory.sorting import COUNTER_BYTES, accumulation_scratch, count_bytes, select_bytes

_VIEWS = (
    "cut",
    "turn",
    "split",
    "expand",
    "write",
    "place",
    "heads",
    *(f"{name} in place" for name in ("add", "add rows", "divide", "scale")),
)


class Replay:
    """Runs the steps of a module's tape; each kind of step is a method.

    Args:
        value: the module's input, which is never dropped.
        name: the module's path.
        others: its other inputs.
        columns: elements of each row that a mean is of.
        output_role: the role of the module's output if that is a sum.
    """

    def __init__(
        self,
        context: Context,
        value: Value,
        name: str = "",
        *,
        others: Sequence[Value] = (),
        columns: int = 1,
        output_role: Role = Role.ACTIVATIONS,
    ) -> None:
        self.context, self.tape, self.name, self._columns = context, context.tape, name, columns
        self._output_role, self._role = output_role, Role.ACTIVATIONS
        self._values: dict[int, Tensor] = dict(enumerate((value, *others)))
        # the value whose memory a value shows, and by that the variables that end when it is dropped
        self._roots: dict[int, int] = {number: number for number in self._values}
        self._held: dict[int, list[Value]] = {number: [] for number in self._values}
        self._sizes: dict[str, int] = {}
        self._bytes_before = 0

    def run(self, steps: Sequence[Step]) -> Value:
        """The module's output, which one variable holds."""
        return self.outputs(steps)[0]

    def outputs(self, steps: Sequence[Step]) -> list[Value]:
        """All outputs, each of which one variable holds."""
        at, output = 0, steps[-1][1]
        numbers = [output] if isinstance(output, int) else output
        while at < len(steps) - 1:
            kind, results, *rest = steps[at]
            at += 1
            if kind == "drop":
                self.release(*self._held.pop(results, ()))
                continue
            operands, *details = rest
            if kind == "skip":
                self._skip(results, *details)
                continue
            self._role = self.role_of(results, next(iter(numbers), None))
            values = [self._operand(item) for item in operands]
            made, skipped = self.replaced(steps[at - 1], values, islice(steps, at, None))
            at += skipped
            if not made:
                result = getattr(self, f"make_{kind.replace(' ', '_')}")(*values, *details)
                made = result if isinstance(result, tuple) else (result,)
            self._put(results, made, self._roots.get(operands[0]) if kind in _VIEWS else None)
        kept = {self._roots[number] for number in numbers}
        # what the caller's variables hold besides the outputs ends with them
        self.release(*(value for root, held in self._held.items() if root not in kept for value in held))
        return [value for value in map(self._values.get, numbers) if isinstance(value, Value)]

    def _skip(self, carried: int, chunks: int) -> None:
        """Leave out chunks of a loop that keep as much as the last one: one operation on what the loop carries.

        Args:
            chunks: 0 before the chunk that they are like.
        """
        tape, old = self.tape, self._values[carried]
        kept_bytes, self._bytes_before = tape.meter.total_bytes - self._bytes_before, tape.meter.total_bytes
        if not chunks:
            return
        kept_bytes *= chunks
        if tape.keeps_outputs_of(BMM):
            # a first pass keeps their products, which the recomputation has taken and replaced when it is through
            products = tape.run(Operation(elements=kept_bytes, width=1, inputs=(old,), always_kept=True))
            kept_bytes += products.block.size_bytes if products.block is not None else 0
            tape.release(products)
        extra_bytes = max(kept_bytes - old.size_bytes, 0) if tape.saving else 0
        new = tape.run(
            Operation(
                elements=old.elements, width=old.width, inputs=(old,), saves=(old,), extra_saved_bytes=extra_bytes
            )
        )
        self.release(*self._held.pop(carried))
        self._values[carried], self._held[carried] = new, [new]

    def role_of(self, results: int | Sequence[int], output: int | None) -> Role:
        """The role of what a step makes if that is a sum, a multiple or a cast."""
        return self._output_role if results == output else Role.ACTIVATIONS

    def release(self, *values: Value) -> None:
        """Variables of these tensors end."""
        self.tape.release(*values)

    def replaced(
        self, _step: Step, _values: Sequence[Any], _following: Iterable[Step]
    ) -> tuple[Sequence[Tensor | None], int]:
        """What something else makes in place of a step, if it does, and how many of the next steps it replaces."""
        return (), 0

    def _put(self, results: int | Sequence[int], made: Sequence[Tensor | None], root: int | None) -> None:
        """Give values their numbers; those of views end with the memory that they show, and some are not made."""
        numbers = [results] if isinstance(results, int) else results
        for number, value in zip_longest(numbers, made[: len(numbers)]):
            self._roots[number] = number if root is None else root
            held = self._held.setdefault(self._roots[number], [])
            if (old := self._values.get(number)) in held:
                # written in place
                held.remove(old)
                self.release(old)
            if value is not None:
                self._values[number] = value
            if isinstance(value, Value):
                held.append(value)

    def _operand(self, operand: Operand) -> Tensor | str:
        if isinstance(operand, int):
            return self._values[operand]
        if operand.startswith("p:"):
            return self.context.weights[f"{self.name}.{operand[2:]}"]
        return operand

    def _width(self, like: Operand) -> int:
        """Bytes per element of what is in fp32, or has the dtype of a value or of the residual stream."""
        if isinstance(like, int):
            return self._values[like].width
        if like.startswith("p:"):
            return self.context.weights[f"{self.name}.{like[2:]}"].width
        if like == "half":
            return self.context.half_bytes or self.context.stream_bytes
        widths = {"long": INDEX_BYTES, "int": INT32_BYTES, "wide": FP32_BYTES, "complex": 2 * FP32_BYTES, "flag": 1}
        return widths.get(like, self.context.stream_bytes)

    def _elements(self, sizes: Sequence[str | int]) -> int:
        """The product of sizes, some of which have names."""
        if not self._sizes:
            recipe = self.context.recipe
            self._sizes = sizes_of(recipe.spec, self.context.layer, recipe.rows, recipe.row_tokens)
        return prod(self._sizes[size] if isinstance(size, str) else size for size in sizes)

    def make_dropout(self, value: Value, key: str | None, rate: float) -> Value:
        """Dropout by the probability under a config key, or a fixed one."""
        found = rate if key is None else self.context.spec.dropout_rate(Number(key=key, default=rate))
        return dropout(self.context, value, found)

    def make_new(self, sizes: Sequence[str | int], like: Operand, *, role: Role = Role.ACTIVATIONS) -> Value:
        """A tensor without a gradient."""
        return self.tape.run(Operation(elements=self._elements(sizes), width=self._width(like), role=role))

    def make_cast(self, value: Tensor, like: Operand) -> Tensor:
        """`to(dtype)`; a weight's copy is not kept."""
        if isinstance(value, Weight):
            return self.context.cast_weight(value, self._width(like))
        return self.context.cast(value, self._width(like), role=self._role)

    def make_copy(self, value: Value) -> Value:
        """`contiguous()`."""
        return in_order(self.context, value, copies=True)

    def make_negate(self, value: Value) -> Value:
        """The opposite."""
        return scale(self.context, value)

    def make_keep_input(self, value: Value) -> Value:
        """A function whose gradient reads its input."""
        return unary(self.context, value)

    def make_keep_output(self, value: Value) -> Value:
        """A function whose gradient reads its output."""
        return unary(self.context, value, saves_output=True, role=self._role)

    def make_power(self, value: Value) -> Value:
        """A power, which autocast computes in fp32."""
        wide = self.context.cast_for("pow.Tensor_Scalar", value)
        result = square(self.context, wide)
        self.tape.release(wide)
        return result

    def make_mean(self, value: Value, sizes: Sequence[str | int] = ()) -> Value:
        """One number for each row."""
        elements = self._elements(sizes) if sizes else value.elements // self._columns
        return self.tape.run(Operation(elements=elements, width=value.width, inputs=(value,)))

    def make_product(self, value: Value, weight: Tensor, *bias_and_autocasts: Any) -> Value:
        """`F.linear` with a weight that is not a module's, perhaps with a bias; last, whether autocast is on."""
        *bias, self.context.autocasts = bias_and_autocasts
        result = linear(self.context, value, weight, *bias)
        self.context.autocasts = True
        return result

    def make_part(self, weight: Weight) -> Value:
        """One expert's part of a parameter, a view; its gradient is copied into zeros for all experts."""
        elements = weight.elements // weight.shape[0]
        return self.tape.run(Operation(elements=elements, width=weight.width, inputs=(weight,), view_of=weight))

    def make_part_product(self, value: Value, part: Value, rows: Sequence[str | int], is_function: bool) -> Value:
        """The product of so many rows with a part of a weight, by `F.linear` or by `@`."""
        return linear(self.context, value, part, rows=self._elements(rows), is_function=is_function)

    def make_layer_norm(self, value: Value, *weights_and_autocasts: Any) -> Value:
        """`F.layer_norm` with a weight and a bias or neither; last, whether autocast is on."""
        *weights, self.context.autocasts = weights_and_autocasts
        result = layer_norm(self.context, value, weights, weights[0].elements if weights else self._columns)
        self.context.autocasts = True
        return result

    def make_grouped_product(self, value: Value, weight: Weight) -> Value:
        """`grouped_mm` of the rows of all experts."""
        return grouped_product(self.context, value, weight)

    def make_batch_product(self, value: Value, weight: Weight) -> Value:
        """`bmm` with a weight, one product per expert."""
        return batch_product(self.context, value, weight)

    def make_soften(self, value: Value, like: Operand) -> Value:
        """A softmax, which may be asked for in fp32 or in the dtype of a value."""
        return soften(self.context, value, self._width(like) if like != "" else None)

    def make_top(self, value: Value, sizes: Sequence[str | int]) -> tuple[Value, Value]:
        """The highest values of each row, and their indices."""
        elements = self._elements(sizes)
        indices = self.tape.run(Operation(elements=elements, width=INDEX_BYTES))
        best = Operation(elements=elements, width=value.width, inputs=(value,), saves=(indices,))
        return self.tape.run(best), indices

    def make_gather(self, value: Value, indices: Value) -> Value:
        """Chosen elements of each row."""
        return self.tape.run(Operation(elements=indices.elements, width=value.width, inputs=(value,), saves=(indices,)))

    def make_gather_into(self, value: Value, indices: Value) -> Value:
        """`scatter`: a copy with a number at the chosen elements."""
        return self.tape.run(Operation(elements=value.elements, width=value.width, inputs=(value,), saves=(indices,)))

    make_mask_out = make_gather_into

    def make_place(self, base: Value, indices: Value, value: Value) -> Value:
        """`base.scatter_(indices, value)` where `base` has no gradient."""
        return self.tape.run(
            Operation(elements=base.elements, width=base.width, inputs=(value,), saves=(indices,), view_of=base)
        )

    def make_index(
        self, value: Tensor, indices: Value, rows: Sequence[str | int], chosen: Sequence[str | int] = ()
    ) -> Value:
        """Chosen rows, one for each index or so many, of so many; backward sorts the indices."""
        count, all_rows = self._elements(chosen) if chosen else indices.elements, self._elements(rows)
        return self.tape.run(
            Operation(
                elements=count * (value.elements // all_rows),
                width=value.width,
                inputs=(value,),
                saves=(indices,),
                backward_scratch_bytes=accumulation_scratch(count, len(rows), all_rows),
            )
        )

    def make_find(self, sizes: Sequence[str | int], among: Sequence[str | int], is_contiguous: bool) -> Value:
        """`nonzero`: positions among so many numbers, which are copied unless they are contiguous (Nonzero.cu)."""
        count = self._elements(among)
        counting_bytes = count_bytes(count, self.context.recipe.gpu_spec)
        copy_bytes = 0 if is_contiguous else count * INDEX_BYTES
        return self.tape.run(
            Operation(
                elements=self._elements(sizes),
                width=INDEX_BYTES,
                leading_scratch=(copy_bytes, COUNTER_BYTES, counting_bytes, -counting_bytes),
                forward_scratch_bytes=select_bytes(count),
            )
        )

    def make_repeat(self, value: Value, sizes: Sequence[str | int]) -> Value:
        """Copies one after another."""
        return self.tape.run(Operation(elements=self._elements(sizes), width=value.width, inputs=(value,)))

    def make_sum(self, value: Value, sizes: Sequence[str | int], gradient: str = "") -> Value:
        """A sum over a dimension, in fp32 under autocast.

        Args:
            gradient: whether it is a `view`; else the expanded gradient is copied, to be cast or to be rows.
        """
        elements, width = self._elements(sizes), self.context.result_width("sum.dim_IntList", value)
        is_view = width == value.width and (elements == value.elements or bool(gradient))
        return self.tape.run(
            Operation(
                elements=elements,
                width=width,
                inputs=() if is_view else (value,),
                passes=(value,) if is_view else (),
            )
        )

    def make_divide(self, value: Value, divisors: Value) -> Value:
        """Divided by a number for each row."""
        return scale_rows(self.context, value, divisors)

    def make_divide_in_place(self, value: Value, divisors: Value) -> Value:
        """The same in place, which keeps a copy of what it overwrites."""
        return self.tape.run(
            Operation(
                elements=value.elements,
                width=value.width,
                inputs=(divisors, value),
                saves=(divisors,),
                view_of=value,
                extra_saved_bytes=value.size_bytes,
            )
        )

    def make_scale_in_place(self, value: Value, factors: Value, is_view: bool) -> Value:
        """Times factors without a gradient; that of a view is copied twice (CopySlices)."""
        return self.tape.run(
            Operation(
                elements=value.elements,
                width=value.width,
                inputs=(value,),
                saves=(factors,),
                view_of=value,
                backward_scratch_bytes=2 * value.size_bytes if is_view else 0,
            )
        )

    def make_add_in_place(self, value: Value, added: Value) -> Value:
        """`value += added`: both receive the gradient itself, unless it is cast."""
        same = value.width == added.width
        return self.tape.run(
            Operation(
                elements=value.elements,
                width=value.width,
                inputs=() if same else (added,),
                passes=(value, added) if same else (value,),
                view_of=value,
            )
        )

    def make_add_rows_in_place(self, value: Value, indices: Value, added: Value) -> Value:
        """`value.index_add_(0, indices, added)`, which saves what it adds, too, for its shape."""
        return self.tape.run(
            Operation(
                elements=value.elements,
                width=value.width,
                passes=(value,),
                inputs=(added,),
                saves=(indices, added),
                view_of=value,
            )
        )

    def make_function(self, *tensors_and_count: Any) -> Value:
        """An autograd function of the tensors that receive gradients; those after them are saved."""
        *tensors, count = tensors_and_count
        given, saved = tensors[:count], tensors[count:]
        return self.tape.run(
            Operation(
                elements=saved[0].elements,
                width=saved[0].width,
                inputs=tuple(given),
                saves=tuple(saved),
                in_function=True,
            )
        )

    def make_add(self, left: Tensor, right: Value | None = None) -> Value:
        """The sum of two values, or of one and a number."""
        if right is None:
            return self.tape.run(Operation(elements=left.elements, width=left.width, passes=(left,)))
        assert isinstance(left, Value)
        if right.elements < left.elements:
            return add_columns(self.context, left, right)
        return add(self.context, left, right, role=self._role)

    def make_subtract(self, left: Value, right: Value, sizes: Sequence[str | int] = ()) -> Value:
        """The difference; a smaller operand has a number for each row.

        The right gradient is negated, then cast or summed.
        """
        width, elements = max(left.width, right.width), self._elements(sizes) if sizes else left.elements
        is_left_whole, is_right_whole = (item.elements == elements for item in (left, right))
        return self.tape.run(
            Operation(
                elements=elements,
                width=width,
                inputs=(right,) if is_left_whole else (left, right),
                passes=(left,) if is_left_whole else (),
                backward_scratch_bytes=elements * width if is_right_whole and right.width != width else 0,
                unreduced_bytes=0 if is_right_whole else elements * width,
            )
        )

    def make_turn(self, value: Value) -> Value:
        """A view of all elements whose gradient is copied, for it comes in another order."""
        return turned(self.context, value)

    def make_autocast(self, value: Value) -> Value:
        """What autocast passes to a product of two values."""
        return self.context.autocast(value)

    def make_product_of_values(self, left: Value, right: Value, sizes: Sequence[str | int]) -> Value:
        """A batch of matrix products of two values."""
        return product_of_values(self.context, left, right, self._elements(sizes))

    def make_convolve(self, value: Value, path: str) -> Value:
        """A convolution over the tokens of each channel, padded at both ends."""
        return convolve(self.context, value, f"{self.name}.{path}")

    def make_unpad(self, value: Value) -> Value:
        """Times the mask of tokens, if some are padding."""
        return scale(self.context, value) if self.context.recipe.padding else self.tape.name(value)

    def make_pad(self, value: Value, sizes: Sequence[str | int]) -> Value:
        """`F.pad`: a copy, even where nothing is missing."""
        return self.tape.run(Operation(elements=self._elements(sizes), width=value.width, inputs=(value,)))

    def make_cumulate(self, value: Value) -> Value:
        """`cumsum`: its gradient is flipped before and after."""
        scratch_bytes = 2 * value.size_bytes
        return self.tape.run(
            Operation(elements=value.elements, width=value.width, inputs=(value,), backward_scratch_bytes=scratch_bytes)
        )

    def make_solve(self, system: Value, right: Value) -> Value:
        """`solve_triangular`: backward makes the negated product, of which one triangle is the gradient."""
        return self.tape.run(
            Operation(
                elements=right.elements,
                width=right.width,
                inputs=(system, right),
                saves=(system,),
                saves_output=True,
                backward_scratch_bytes=system.size_bytes,
            )
        )

    def make_cut(self, value: Value, share: str | Sequence[str | int]) -> Value:
        """A view of a part, whose gradient is copied into zeros as large as the whole."""
        if not isinstance(share, str):
            return self.tape.slice(value, self._elements(share))
        spec = self.context.spec
        heads = spec.heads + 2 * spec.kv_heads
        part, whole = {
            "half": (1, 2),
            "rotated": (spec.rotary_dim, spec.head_dim),
            "rest": (spec.head_dim - spec.rotary_dim, spec.head_dim),
            "query": (spec.heads, heads),
            "key": (spec.kv_heads, heads),
        }[share]
        if part == whole:
            return self.tape.name(value)
        return self.tape.slice(value, value.elements * part // whole)

    def make_split(self, value: Value, parts: int | Sequence[Any]) -> tuple[Value, ...]:
        """Views of equal parts, or of parts of latents, or of parts that each have so many elements in a row."""
        if isinstance(parts, int):
            return self.tape.split(value, parts)
        if not isinstance(parts[0], str):
            widths_of_parts = [self._elements(part) for part in parts]
            rows = value.elements // sum(widths_of_parts)
            return self.tape.split(value, tuple(rows * width for width in widths_of_parts))
        sizes = self.context.spec.latent
        assert sizes is not None
        widths = {
            "plain": sizes.plain_dim,
            "rotated": sizes.rotated_dim,
            "value": sizes.value_dim,
            "latent key": sizes.key_rank,
        }
        whole = sum(widths[part] for part in parts)
        return self.tape.split(value, tuple(value.elements * widths[part] // whole for part in parts))

    def make_expand(self, value: Tensor, sizes: Sequence[str | int] = ()) -> Value:
        """A view with copies, one for each head if no sizes are given, whose gradients are added up."""
        elements = self._elements(sizes) if sizes else value.elements * self.context.spec.heads
        shown = value if isinstance(value, Value) else Value(0, 0, needs_gradient=False, block=None)
        return self.tape.run(Operation(elements=elements, width=value.width, inputs=(value,), view_of=shown))

    def make_empty(self, _elements: str, like: Operand) -> Value:
        """Memory for the plain and the rotated elements of each head."""
        sizes = self.context.spec.latent
        assert sizes is not None
        elements = self.context.tokens * self.context.spec.heads * (sizes.plain_dim + sizes.rotated_dim)
        return self.tape.run(Operation(elements=elements, width=self._width(like)))

    def make_write(self, base: Value, value: Value) -> Value:
        """`base[...] = value`: CopySlices copies the gradient of all of it, and that of the part once more."""
        return self.tape.run(
            Operation(
                elements=base.elements,
                width=base.width,
                inputs=(base, value) if base.needs_gradient else (value,),
                view_of=base,
                backward_scratch_bytes=(0 if base.needs_gradient else base.size_bytes)
                + (value.elements * base.width if value.width != base.width else 0),
            )
        )

    def make_join(self, *parts: Value) -> Value:
        """`torch.cat`: in the widest dtype; gradients of that dtype are views."""
        width = max(part.width for part in parts)
        return self.tape.run(
            Operation(
                elements=sum(part.elements for part in parts),
                width=width,
                inputs=tuple(part for part in parts if part.width != width),
                passes=tuple(part for part in parts if part.width == width),
            )
        )

    def make_multiply(self, left: Any, right: Any = None, shape: str = "") -> Value:
        """The product of two values, of a value and a tensor without a gradient, or of a value and a number.

        Args:
            shape: whether `right` has a number for each of the `rows` or `columns` of `left`.
        """
        context = self.context
        if shape:
            return (scale_columns if shape == "columns" else scale_rows)(context, left, right)
        if right is None:
            return scale(context, left, role=self._role)
        if isinstance(right, str):
            return self._times_table(left, right, ())
        if not right.needs_gradient and right.elements < left.elements:
            return self._times_table(left, right.width, (right,))
        return multiply(context, left, right)

    def _times_table(self, value: Value, table: str | int, saves: tuple[Value, ...]) -> Value:
        """Times a tensor without a gradient; if that is wider, the gradient is computed in its dtype and cast."""
        table_bytes = table if isinstance(table, int) else self._table_bytes(table)
        width = max(value.width, table_bytes)
        operation = Operation(elements=value.elements, width=width, inputs=(value,), saves=saves)
        if table == "complex":
            # backward multiplies by the conjugate, a copy of the table
            copy_bytes = self.context.recipe.row_tokens * self.context.spec.rotary_dim * FP32_BYTES
            operation = replace(operation, backward_scratch_bytes=copy_bytes)
        elif width != value.width:
            operation = replace(operation, leading_gradient_scratch=(value.elements * width,))
        return self.tape.run(operation)

    def _table_bytes(self, kind: str) -> int:
        """FSDP2's mixed precision casts what layers receive."""
        if kind == "buffer":
            return DTYPE_BYTES[self.context.recipe.weight_dtype]
        narrow = kind == "narrow" or (kind == "wide" and self.context.recipe.casts_gathered)
        return self.context.stream_bytes if narrow else FP32_BYTES
