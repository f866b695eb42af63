"""A fused kernel on the tape: one operation with the memory that the kernel's spec states."""

from collections.abc import Mapping
from dataclasses import fields, replace

from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.tensors import Tensor, Value, Weight
from ligerprof.kernels.spec import KernelMemory, KernelShape
from ligerprof.roles import Role
from ligerprof.torch_memory.dtypes import FP32_BYTES, together


def kernel_memory(
    context: Context, slot: str, value: Value, weight: Weight | None = None, factors: tuple[Value, Value] | None = None
) -> KernelMemory:
    """The memory of one call on `value` of the kernel in `slot`.

    Args:
        weight: the kernel's weight; without one, `parameter_bytes` is the residual stream's. A norm's gives the
            width of the vectors, which are tokens or heads.
        factors: of adapters on the head, for the fused loss.
    """
    spec, recipe = context.spec, context.recipe
    is_vector = weight is not None and len(weight.shape) == 1
    width = weight.elements if weight is not None and is_vector else spec.hidden_size
    tokens = value.elements // width if is_vector else context.tokens
    shape = KernelShape(
        tokens=tokens,
        sequences=recipe.rows,
        hidden=width,
        # of gates; those of a shared expert are not as wide as those of other layers
        intermediate=value.elements // tokens,
        vocab=spec.vocab_size,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        activation_bytes=value.width,
        parameter_bytes=weight.width if weight is not None else context.stream_bytes,
        compute_bytes=context.half_bytes,
        weight_requires_grad=weight is not None and weight.needs_gradient,
        sm_count=recipe.gpu_spec.sm_count,
        input_requires_grad=value.needs_gradient,
        low_rank=0 if factors is None else factors[0].elements // context.tokens,
        factor_bytes=FP32_BYTES if factors is None else factors[0].width,
        flce_budget=recipe.flce_budget,
    )
    memory = context.kernels[slot].memory
    assert memory is not None, "plain torch is counted operation by operation"
    return memory(shape)


def call_kernel(
    context: Context,
    memory: KernelMemory,
    inputs: Mapping[str, Tensor],
    *,
    elements: int,
    width: int,
) -> Value:
    """Run a kernel on inputs named as in its spec; its output has `elements` of `width` bytes.

    If backward allocates no gradient for an input, the gradient overwrites the saved input, or else the output's
    gradient.
    """
    values = tuple(item for item in inputs.values() if isinstance(item, Value))
    weights = tuple(item for item in inputs.values() if isinstance(item, Weight))
    kept = _kept_values(memory, inputs)
    makes = memory.backward_gradient_bytes > sum(weight.size_bytes for weight in weights if weight.trainable)
    return context.tape.run(
        Operation(
            elements=elements,
            width=width,
            inputs=(*values, *weights) if makes else weights,
            reuses=() if makes else kept,
            passes=() if makes else tuple(item for item in values if item not in kept),
            saves=kept,
            saves_output=memory.keeps_output,
            extra_saved_bytes=memory.saved_bytes,
            # of a norm: its weight, and with a bias the second statistic
            other_saves=2 * len(weights) - 1 if weights else 0,
            view_of=None if memory.output_bytes else values[0],
            forward_scratch_bytes=memory.forward_temporary_bytes,
            backward_scratch_bytes=memory.backward_temporary_bytes,
            scratch_role=Role.KERNEL_WORKSPACE,
            in_function=True,
        )
    )


def call_loss(
    context: Context,
    memory: KernelMemory,
    value: Value,
    weight: Weight | None,
    name: str,
    factors: tuple[Value, Value] | None = None,
) -> Value:
    """Run a fused loss on `value`, named `name` in its spec; it may compute gradients in its forward pass.

    Args:
        factors: of adapters on the head, [tokens, rank] and [words, rank].
    """
    early: tuple[tuple[Tensor, int], ...] = ()
    product_bytes = context.half_bytes or value.width
    if factors is not None:
        thin, wide = factors
        early = ((thin, thin.elements * product_bytes), (wide, wide.size_bytes))
    if weight is not None and memory.forward_gradient_bytes:
        early = (*early, (weight, weight.size_bytes if weight.needs_gradient else 0))
    if memory.forward_gradient_bytes:
        early = ((value, memory.forward_gradient_bytes - sum(size_bytes for _, size_bytes in early)), *early)
    cast_bytes = memory.backward_gradient_bytes
    inputs: tuple[Tensor, ...] = ()
    if factors is not None and factors[0].width != product_bytes:
        inputs, cast_bytes = (factors[0],), cast_bytes - factors[0].size_bytes
    if cast_bytes:
        inputs = (value, *inputs)
    if weight is not None and not early:
        inputs = (*inputs, weight)
    kept = _kept_values(memory, {name: value})
    casts = tuple(
        item.elements * product_bytes for item in (value, weight) if item is not None and item.width != product_bytes
    )
    if sum(casts) >= memory.forward_temporary_bytes:
        casts = ()
    left_bytes = memory.forward_temporary_bytes - sum(casts)
    workspace_bytes = min(memory.workspace_bytes, left_bytes)
    return context.tape.run(
        Operation(
            elements=1,
            width=FP32_BYTES,
            inputs=inputs,
            early=early,
            reuses=() if inputs or early else kept,
            saves=kept,
            extra_saved_bytes=memory.saved_bytes,
            leading_scratch=casts,
            forward_scratch_bytes=together(left_bytes - workspace_bytes, workspace_bytes),
            backward_scratch_bytes=memory.backward_temporary_bytes,
            scratch_role=Role.KERNEL_WORKSPACE,
            is_product=weight is not None,
            in_function=True,
        )
    )


def _kept_values(memory: KernelMemory, inputs: Mapping[str, Tensor]) -> tuple[Value, ...]:
    return tuple(item for name, item in inputs.items() if name in memory.kept_inputs and isinstance(item, Value))


def share_of(memory: KernelMemory, part: int, whole: int) -> KernelMemory:
    """The share of one of several tensors that a kernel processes alike."""
    sizes = {
        item.name: getattr(memory, item.name) * part // whole for item in fields(memory) if item.name.endswith("_bytes")
    }
    return replace(memory, **sizes)
