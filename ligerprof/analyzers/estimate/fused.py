"""Kernels that fuse two operations of a decoder layer: addition and norm, gated activation and linear layer.

Each is traced as the operations that it fuses, because their tensors are allocated and freed separately.
"""

from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.kernel_call import kernel_memory
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.operations import add, factor_of, product_operator
from ligerprof.analyzers.estimate.tensors import Tensor, Value, Weight
from ligerprof.kernels.registry import find_kernel_set
from ligerprof.kernels.selection import find_slot
from ligerprof.models import ModelSpec
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Role


def add_and_norm(context: Context, residual: Value, added: Value, name: str) -> tuple[Value, Value]:
    """`residual + added`, which replaces `added`, and its norm with the weight `{name}.weight`, by one kernel."""
    middle = add(context, residual, added)
    weight = context.weights[f"{name}.weight"]
    memory = kernel_memory(context, _norm_kernel(context) or "", residual, weight)
    weight_gradient_bytes = weight.size_bytes if weight.trainable else 0
    # an addend of another dtype gets its own gradient next to the sum's, before the addition's backward
    twin_bytes = memory.backward_gradient_bytes - weight_gradient_bytes - middle.size_bytes
    normed = context.tape.run(
        Operation(
            elements=middle.elements,
            width=middle.width,
            inputs=(middle, weight),
            sums=(middle,),
            saves=(middle,),
            extra_saved_bytes=memory.saved_bytes,
            forward_scratch_bytes=memory.forward_temporary_bytes,
            backward_scratch_bytes=memory.backward_temporary_bytes + twin_bytes,
            scratch_role=Role.KERNEL_WORKSPACE,
            in_function=True,
        )
    )
    context.tape.release(added)
    return middle, normed


def adds_in_norm(context: Context) -> bool:
    """Whether a kernel fuses the residual addition between a layer's sublayers with the norm after it."""
    return context.spec.architecture.layer_norms is not None and _norm_kernel(context) is not None


def _norm_kernel(context: Context) -> str | None:
    """Name of the kernel that fuses a residual addition with the model's norm, if the recipe has it."""
    feature = context.spec.architecture.norm.form.feature
    kernel = None if feature is None else find_slot(feature).with_residual_add
    return kernel if kernel in context.kernels else None


def keeps_products(recipe: TrainingRecipe) -> bool:
    """Whether adapters prevent a kernel from recomputing the product of a gated activation."""
    down = recipe.spec.architecture.mlp.down
    adapted = (recipe.lora is not None or recipe.qlora is not None) and down in recipe.adapted_layers
    return adapted and _linear_kernel(recipe.spec) in find_kernel_set(recipe.providers, recipe.spec)


def _linear_kernel(spec: ModelSpec) -> str | None:
    """Name of the kernel that fuses the model's gated activation with the linear layer after it."""
    gate = spec.architecture.mlp.gate
    return None if gate is None or gate not in spec.features else find_slot(gate).with_next_linear


def takes_gates(context: Context, name: str) -> bool:
    """Whether the linear layer after a gated activation is fused with it; one with an adapter or packed is not."""
    is_plain = f"{name}.lora_A" not in context.weights and not context.weights[f"{name}.weight"].packed_sizes
    return is_plain and _linear_kernel(context.spec) in context.kernels


def gated_linear(context: Context, gate: Value, up: Value, name: str) -> Value:
    """`linear(act(gate) * up)`: saves gate, up and weight, and recomputes the product in backward."""
    tape, weight, bias = context.tape, context.weights[f"{name}.weight"], context.weights.get(f"{name}.bias")
    memory = kernel_memory(context, _linear_kernel(context.spec) or "", gate, weight)
    read = _cast_weight(context, weight, gate.width)
    parameters: tuple[Tensor, ...] = (read,) if bias is None else (read, bias)
    # the product, without the one element that represents the result
    product_bytes = memory.forward_temporary_bytes - gate.width
    makes = memory.backward_gradient_bytes > (weight.size_bytes if weight.trainable else 0)
    kept = tape.run(
        Operation(
            elements=1,
            width=gate.width,
            inputs=(*parameters, gate, up) if makes else parameters,
            reuses=() if makes else (gate, up),
            saves=(gate, up, read),
            leading_gradient_scratch=(product_bytes,),
            scratch_role=Role.KERNEL_WORKSPACE,
            is_product=True,
            in_function=True,
        )
    )
    factor = factor_of(gate, weight, context.tokens)
    output = tape.run(
        Operation(
            elements=context.tokens * factor[1],
            width=gate.width,
            passes=(kept,),
            leading_scratch=(product_bytes,),
            scratch_role=Role.KERNEL_WORKSPACE,
            is_product=True,
            in_function=True,
            operator=product_operator(bias),
            factor=factor,
        )
    )
    tape.release(kept)
    if isinstance(read, Value):
        tape.release(read)
    return output


def _cast_weight(context: Context, weight: Weight, width: int) -> Tensor:
    """A cast of the weight that the kernel makes itself, outside autocast's cache."""
    if weight.width == width:
        return weight
    return context.tape.run(
        Operation(
            elements=weight.elements,
            width=width,
            inputs=(weight,),
            role=Role.WEIGHT_CASTS,
            gradient_role=Role.GRADIENTS,
        )
    )
