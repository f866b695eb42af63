"""scaled_dot_product_attention on the tape: torch_memory's program carried out on sizes."""

from dataclasses import replace

from ligerprof.analyzers.estimate.context import Context, is_eager
from ligerprof.analyzers.estimate.masks import has_mask
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.operations import dropout, renamed, saved_factors, scale
from ligerprof.analyzers.estimate.tensors import Value
from ligerprof.kernels.selection import find_slot
from ligerprof.models.architecture import Feature
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Role
from ligerprof.torch_memory import attention as fused
from ligerprof.torch_memory import softmax
from ligerprof.torch_memory.attention import AttentionKernel, AttentionProblem, attend, choose_kernel
from ligerprof.torch_memory.dtypes import FP32_BYTES, Scratch
from ligerprof.torch_memory.saved_tensors import BMM

SCORES = Role.ATTENTION_TEMPORARIES
# use_gqa_in_sdpa in transformers/integrations/sdpa_attention.py
_LARGEST_GROUPED_HEAD = 256


def attention_problem(recipe: TrainingRecipe, layer: int) -> AttentionProblem:
    """The call of scaled_dot_product_attention that transformers makes in a layer."""
    spec, masked = recipe.spec, has_mask(recipe, layer)
    grouped = spec.heads != spec.kv_heads and not masked and spec.head_dim <= _LARGEST_GROUPED_HEAD
    return AttentionProblem(
        dtype=recipe.compute_dtype,
        batch=recipe.rows,
        heads=spec.heads,
        kv_heads=spec.kv_heads if grouped else spec.heads,
        queries=recipe.row_tokens,
        keys=recipe.row_tokens,
        head_dim=spec.head_dim,
        value_dim=spec.value_dim,
        masked=masked,
        causal=not masked and recipe.row_tokens > 1,
        dropout=spec.dropout_rate(spec.architecture.attention.dropout),
        grouped=grouped,
    )


def attention_kernels(recipe: TrainingRecipe) -> tuple[AttentionKernel, ...]:
    """The kernels that run where autograd records the layers, in the order of the layers."""
    layers = recipe.spec.layer_kinds.examples
    kernels = (choose_kernel(attention_problem(recipe, layer), recipe.gpu_spec) for layer in layers)
    return tuple(dict.fromkeys(kernels))


def scaled_dot_product(context: Context, query: Value, key: Value, value: Value) -> Value:
    """sdpa_attention_forward: heads repeated unless torch groups them, and the output with its tokens in order."""
    tape = context.tape
    # reentrant checkpointing runs the first pass under no_grad
    differentiable = any(item.needs_gradient for item in (query, key, value))
    recorded = differentiable and (tape.saving or not context.recipe.reentrant)
    problem = replace(attention_problem(context.recipe, context.layer), needs_gradient=recorded)
    keys, values = (item if problem.grouped else repeat_heads(context, item) for item in (key, value))
    # autocast casts the arguments of an operator from the last one on
    read_values, read_keys, read_query = (context.autocast(item) for item in (values, keys, query))
    inputs = (read_query, read_keys, read_values)
    kernel = choose_kernel(problem, context.recipe.gpu_spec)
    attended = attend(_Operations(context, problem), kernel, problem, inputs, context.mask)
    tape.release(*inputs)
    output = in_order_of_tokens(context, attended) if _splits_heads(context, kernel, problem) else tape.name(attended)
    tape.release(attended, *(() if problem.grouped else (keys, values)))
    return output


def _splits_heads(context: Context, kernel: AttentionKernel, problem: AttentionProblem) -> bool:
    """Whether the output's heads lie apart, so that `transpose(1, 2).contiguous()` copies it."""
    # cuDNN's and flash attention's output is laid out as the query
    if kernel is AttentionKernel.MATH or (kernel is not AttentionKernel.EFFICIENT and _has_heads_apart(context)):
        return problem.heads > 1
    return kernel is AttentionKernel.FLASH and fused.flash_padding(problem.head_dim) > 0


def in_order_of_tokens(context: Context, value: Value) -> Value:
    """`transpose(1, 2).contiguous()`: a copy that is handed the gradient itself."""
    return context.tape.run(Operation(elements=value.elements, width=value.width, passes=(value,)))


def as_heads(context: Context, value: Value) -> Value:
    """`view(...).transpose(1, 2)`, whose gradient is copied to have its tokens in order."""
    return context.tape.run(Operation(elements=value.elements, width=value.width, inputs=(value,), view_of=value))


def repeat_heads(context: Context, item: Value) -> Value:
    """`repeat_kv`: a copy with as many heads as the query has, or an expanded view of a single head.

    Its gradient sums over the copies.
    """
    if context.spec.heads == context.spec.kv_heads:
        return context.tape.name(item)
    elements, view_of = _repeated_elements(context, item), item if context.spec.kv_heads == 1 else None
    return context.tape.run(Operation(elements=elements, width=item.width, inputs=(item,), view_of=view_of))


def _repeated_elements(context: Context, item: Value) -> int:
    return item.elements // context.spec.kv_heads * context.spec.heads


def score_product(context: Context, query: Value, key: Value) -> Value:
    """Query times key as one batch of matrices."""
    joined, expanded = _has_heads_apart(context), context.spec.heads > context.spec.kv_heads == 1
    copied = context.tape.name(query) if joined else _heads_apart(context, query)
    copied_key = context.tape.name(key) if joined and not expanded else _repeated_apart(context, key)
    product = context.tape.run(
        Operation(
            elements=context.tokens * context.recipe.row_tokens * context.spec.heads,
            width=query.width,
            # bmm's second factor is the first whose gradient is computed, and the last that is freed
            inputs=(copied_key, copied),
            saves=saved_factors(copied, copied_key),
            role=SCORES,
            gradient_role=SCORES,
            scratch_role=Role.ACTIVATIONS,
            operator=BMM,
        )
    )
    context.tape.release(copied, copied_key)
    return product


def weighted_sum(context: Context, probabilities: Value, value: Value) -> Value:
    """Probabilities times value, heads apart; the gradient that comes has the tokens in order, and is copied."""
    tape, copied = context.tape, _repeated_apart(context, value)
    product = tape.run(
        Operation(
            elements=context.tokens * context.spec.heads * context.spec.value_dim,
            width=value.width,
            inputs=(copied, probabilities),
            saves=saved_factors(probabilities, copied),
            operator=BMM,
        )
    )
    tape.release(copied)
    if not _has_heads_between(context):
        return product
    view = tape.run(Operation(elements=product.elements, width=product.width, inputs=(product,), view_of=product))
    tape.release(product)
    return view


def soften(context: Context, scores: Value, width: int) -> Value:
    """`softmax` with a result of `width` bytes per element: keeps it."""
    tape = context.tape
    dtype, result_dtype = (_dtype(context, size) for size in (scores.width, width))
    read = cast_scores(context, scores, width) if softmax.casts_first(dtype, result_dtype) else tape.name(scores)
    sharp = tape.run(_softmax_operation(read, width, result_dtype))
    tape.release(read)
    return sharp


def _softmax_operation(scores: Value, width: int, dtype: str, scratch: Scratch = ()) -> Operation:
    return Operation(
        elements=scores.elements,
        width=width,
        inputs=(scores,),
        saves_output=True,
        forward_scratch_bytes=scratch,
        backward_scratch_bytes=softmax.backward_scratch(scores.elements, dtype, dtype),
        role=SCORES,
        gradient_role=SCORES,
    )


def cast_scores(context: Context, scores: Value, width: int) -> Value:
    """`to(dtype)` of something as large as the scores."""
    if scores.width == width:
        return context.tape.name(scores)
    return context.tape.run(
        Operation(elements=scores.elements, width=width, inputs=(scores,), role=SCORES, gradient_role=SCORES)
    )


def _dtype(context: Context, width: int) -> str:
    return "float32" if width == FP32_BYTES else context.recipe.compute_dtype


def _has_heads_between(context: Context) -> bool:
    """Whether the heads of one sequence lie between its tokens, so that one batch of matrices needs a copy."""
    return context.recipe.rows > 1 and context.spec.heads > 1


def _has_heads_apart(context: Context) -> bool:
    """Whether the heads of query and key lie apart.

    They do if the model joins the rotated part of each head with the rest, or if a kernel norms heads that lie apart:
    it writes what it reads as rows.
    """
    row = context.spec.architecture.attention
    if row.latent:
        return True
    joins = row.rotary is not None and row.rotary.share is not None and context.rotates
    if joins and find_slot(Feature.ROTARY).name not in context.kernels:
        return True
    return (
        row.qk_norms is not None
        and row.norms_apart
        and context.is_fused(find_slot(Feature.RMS_NORM).name, row.qk_norms[0])
    )


def _heads_apart(context: Context, item: Value) -> Value:
    """`reshape` for bmm: a copy, whose gradient is a view; of one sequence it is a view itself."""
    if not _has_heads_between(context):
        return context.tape.name(item)
    return context.tape.run(Operation(elements=item.elements, width=item.width, passes=(item,)))


def _repeated_apart(context: Context, item: Value) -> Value:
    """The same of key or value: copies of heads lie apart already, expanded ones do not."""
    spec, recipe = context.spec, context.recipe
    repeated_by_torch = not is_eager(recipe) and attention_problem(recipe, context.layer).grouped
    copied = spec.heads != spec.kv_heads and (spec.kv_heads > 1 or repeated_by_torch)
    return context.tape.name(item) if copied else _heads_apart(context, item)


class _Operations:
    """AttentionOperations on a tape."""

    def __init__(self, context: Context, problem: AttentionProblem) -> None:
        self._context, self._tape, self._problem = context, context.tape, problem

    def additive_mask(self, _mask: Value) -> Value:
        elements = self._problem.batch * self._problem.queries * self._problem.keys
        return self._tape.run(Operation(elements=elements, width=self._problem.element_bytes, role=SCORES))

    def causal_mask(self) -> Value:
        elements = self._problem.queries * self._problem.keys
        # the booleans that it is made of: ones, and their lower triangle
        made = (elements, elements, -elements)
        return self._tape.run(Operation(elements=elements, width=FP32_BYTES, role=SCORES, leading_scratch=made))

    def pad_heads(self, tensor: Value, missing: int) -> Value:
        padded = tensor.elements // self._problem.head_dim * (self._problem.head_dim + missing)
        return self._tape.run(Operation(elements=padded, width=tensor.width, inputs=(tensor,)))

    def narrow_heads(self, tensor: Value, missing: int) -> Value:
        width = self._problem.value_dim
        narrow = tensor.elements // (width + missing) * width
        return self._tape.run(Operation(elements=narrow, width=tensor.width, inputs=(tensor,), view_of=tensor))

    def pad_mask(self, mask: Value, missing: int) -> Value:
        padded = mask.elements // self._problem.keys * (self._problem.keys + missing)
        return self._tape.run(Operation(elements=padded, width=mask.width, role=SCORES))

    def run(self, kernel: AttentionKernel, inputs: tuple[Value, Value, Value], mask: Value | None) -> Value:
        query = inputs[0]
        problem = replace(self._problem, head_dim=query.elements // self._problem.rows)
        forward = fused.forward_scratch(kernel, problem, self._context.recipe.gpu_spec)
        output_bytes = inputs[2].size_bytes if self._context.spec.latent is not None else query.size_bytes
        # the gradient has the tokens in order; cuDNN copies it to the layout of the output
        copies = kernel is AttentionKernel.CUDNN and _splits_heads(self._context, kernel, problem)
        statistics_bytes = fused.log_sum_exp_bytes(kernel, problem)
        return self._tape.run(
            Operation(
                elements=output_bytes // query.width,
                width=query.width,
                inputs=inputs,
                # in the order in which the gradient function reads them
                saves=(inputs[1], query, inputs[2]) if mask is None else (inputs[1], query, inputs[2], mask),
                saves_output=True,
                extra_saved_bytes=statistics_bytes + sum(fused.random_state_sizes(kernel)),
                forward_scratch_bytes=forward,
                leading_gradient_scratch=(output_bytes,) if copies else (),
                backward_scratch_bytes=fused.backward_scratch(kernel, problem),
                scratch_role=SCORES,
                operator=kernel.operator,
            )
        )

    def widen(self, tensor: Value) -> Value:
        return self._context.cast(tensor, FP32_BYTES)

    def scale(self, tensor: Value) -> Value:
        return scale(self._context, tensor)

    def repeat_heads(self, tensor: Value) -> Value:
        if not self._problem.grouped:
            return self._tape.name(tensor)
        elements = _repeated_elements(self._context, tensor)
        return self._tape.run(Operation(elements=elements, width=tensor.width, inputs=(tensor,)))

    def multiply(self, query: Value, key: Value) -> Value:
        scaled = scale(self._context, key)
        return renamed(self._context, scaled, score_product(self._context, query, scaled))

    def add_in_place(self, scores: Value, mask: Value) -> None:
        """No memory, and nothing kept."""

    def softmax(self, scores: Value) -> Value:
        rows, columns = self._problem.rows, self._problem.keys
        scratch = softmax.safe_scratch(rows, columns, FP32_BYTES)
        return self._tape.run(_softmax_operation(scores, FP32_BYTES, "float32", scratch))

    def drop(self, probabilities: Value) -> Value:
        return dropout(self._context, probabilities, self._problem.dropout)

    def restore_dtype(self, tensor: Value) -> Value:
        width = self._problem.element_bytes
        if tensor.gradient_role is SCORES:
            return cast_scores(self._context, tensor, width)
        return self._context.cast(tensor, width)

    def weigh(self, probabilities: Value, value: Value) -> Value:
        return weighted_sum(self._context, probabilities, value)

    def release(self, *tensors: Value | None) -> None:
        self._tape.release(*(tensor for tensor in tensors if tensor is not None))

    def replace(self, old: Value, new: Value) -> Value:
        return renamed(self._context, old, new)
