"""scaled_dot_product_attention on the tape: torch_memory's program carried out on sizes."""

from dataclasses import replace

from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.masks import has_mask
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.operations import (
    dropout,
    in_order,
    product_of_values,
    renamed,
    scale,
    soften,
    turned,
)
from ligerprof.analyzers.estimate.tensors import Value
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Role
from ligerprof.torch_memory import attention as fused
from ligerprof.torch_memory import softmax
from ligerprof.torch_memory.attention import AttentionKernel, AttentionProblem, attend, choose_kernel
from ligerprof.torch_memory.dtypes import FP32_BYTES

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


def scaled_dot_product(context: Context, query: Value, key: Value, value: Value, *, apart: bool) -> Value:
    """sdpa_attention_forward: heads repeated unless torch groups them, and the output with its tokens in order.

    Args:
        apart: whether the heads of query and key lie apart.
    """
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
    attended = attend(_Operations(context, problem, apart=apart), kernel, problem, inputs, context.mask)
    tape.release(*inputs)
    output = in_order(context, attended, copies=_splits_heads(kernel, problem, apart=apart))
    tape.release(attended, *(() if problem.grouped else (keys, values)))
    return output


def _splits_heads(kernel: AttentionKernel, problem: AttentionProblem, *, apart: bool) -> bool:
    """Whether the output's heads lie apart, so that `transpose(1, 2).contiguous()` copies it."""
    # cuDNN's and flash attention's output is laid out as the query
    if kernel is AttentionKernel.MATH or (kernel is not AttentionKernel.EFFICIENT and apart):
        return problem.heads > 1
    return kernel is AttentionKernel.FLASH and fused.flash_padding(problem.head_dim) > 0


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


class _Operations:
    """AttentionOperations on a tape."""

    def __init__(self, context: Context, problem: AttentionProblem, *, apart: bool) -> None:
        self._context, self._tape, self._problem, self._apart = context, context.tape, problem, apart

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
        copies = kernel is AttentionKernel.CUDNN and _splits_heads(kernel, problem, apart=self._apart)
        log_sum_exp_bytes = fused.log_sum_exp_bytes(kernel, problem)
        return self._tape.run(
            Operation(
                elements=output_bytes // query.width,
                width=query.width,
                inputs=inputs,
                # in the order in which the gradient function reads them
                saves=(inputs[1], query, inputs[2]) if mask is None else (inputs[1], query, inputs[2], mask),
                saves_output=True,
                extra_saved_bytes=(log_sum_exp_bytes, *fused.random_state_sizes(kernel)),
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
        scaled, expanded = scale(self._context, key), self._context.spec.heads > self._context.spec.kv_heads == 1
        read_query = in_order(self._context, query, copies=self._heads_between and not self._apart)
        read_key = in_order(self._context, scaled, copies=self._copies_shared and (expanded or not self._apart))
        elements = self._problem.rows * self._problem.keys
        product = product_of_values(self._context, read_query, read_key, elements, role=SCORES)
        self._tape.release(read_query, read_key, scaled)
        return product

    @property
    def _heads_between(self) -> bool:
        """Whether the heads of one sequence lie between its tokens, so that one batch of matrices needs a copy."""
        return self._problem.batch > 1 and self._problem.heads > 1

    @property
    def _copies_shared(self) -> bool:
        """The same of key or value: copies of heads lie apart already, expanded ones do not."""
        spec = self._context.spec
        repeated = spec.heads != spec.kv_heads and (spec.kv_heads > 1 or self._problem.grouped)
        return self._heads_between and not repeated

    def add_in_place(self, scores: Value, mask: Value) -> None:
        """No memory, and nothing kept."""

    def softmax(self, scores: Value) -> Value:
        scratch = softmax.safe_scratch(self._problem.rows, self._problem.keys, FP32_BYTES)
        return soften(self._context, scores, FP32_BYTES, scratch=scratch, role=SCORES)

    def drop(self, probabilities: Value) -> Value:
        return dropout(self._context, probabilities, self._problem.dropout)

    def restore_dtype(self, tensor: Value) -> Value:
        return self._context.cast(tensor, self._problem.element_bytes, role=tensor.gradient_role)

    def weigh(self, probabilities: Value, value: Value) -> Value:
        read = in_order(self._context, value, copies=self._copies_shared)
        product = product_of_values(self._context, probabilities, read, self._problem.rows * self._problem.value_dim)
        self._tape.release(read)
        if not self._heads_between:
            return product
        # the gradient that comes has the tokens in order, and is copied
        return renamed(self._context, product, turned(self._context, product))

    def release(self, *tensors: Value | None) -> None:
        self._tape.release(*(tensor for tensor in tensors if tensor is not None))

    def replace(self, old: Value, new: Value) -> Value:
        return renamed(self._context, old, new)
