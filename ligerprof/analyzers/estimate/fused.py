"""Kernels that join two operations of a decoder layer: addition and norm, gated activation and linear layer.

Each is written down as the operations that it joins, since its parts come to life and are let go of one by one.
"""

from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.kernel_call import kernel_memory
from ligerprof.analyzers.estimate.norms import norm
from ligerprof.analyzers.estimate.operations import add
from ligerprof.analyzers.estimate.tape import Operation, Tensor, Value, Weight
from ligerprof.kernels.registry import find_kernel_set
from ligerprof.kernels.slots import find_slot
from ligerprof.models import ModelSpec
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Role


def add_and_norm(context: Context, residual: Value, added: Value, name: str) -> tuple[Value, Value]:
    """`residual + added`, which takes the place of `added`, and its norm, whose weight is `{name}.weight`."""
    middle = add(context, residual, added)
    kernel = find_slot(context.spec.architecture.norm.feature).with_residual_add
    if kernel is None or kernel not in context.kernels:
        context.tape.release(added)
        return middle, norm(context, middle, name)
    weight = context.weights[f"{name}.weight"]
    memory = kernel_memory(context, kernel, residual, weight)
    weight_gradient_bytes = weight.size_bytes if weight.trainable else 0
    # the gradient of an addend of another dtype is written beside the sum's, before the addition's own turn
    twin_bytes = memory.backward_gradient_bytes - weight_gradient_bytes - middle.size_bytes
    normed = context.tape.run(
        Operation(
            elements=middle.elements,
            width=middle.width,
            inputs=(middle, weight),
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


def keeps_products(recipe: TrainingRecipe) -> bool:
    """Whether adapters keep a kernel from making a gated activation's product anew, as it otherwise would."""
    adapted = recipe.lora is not None or recipe.qlora is not None
    return adapted and _linear_kernel(recipe.spec) in find_kernel_set(recipe.kernels, recipe.provider)


def _linear_kernel(spec: ModelSpec) -> str | None:
    """Name of the kernel that joins the model's gated activation with the linear layer after it."""
    return None if spec.mlp == "gelu" else find_slot(spec.mlp).with_next_linear


def takes_gates(context: Context, name: str) -> bool:
    """Whether the linear layer behind a gated activation multiplies the gates itself: one with an adapter does not."""
    return _linear_kernel(context.spec) in context.kernels and f"{name}.lora_A" not in context.weights


def gated_linear(context: Context, gate: Value, up: Value, name: str) -> Value:
    """`linear(act(gate) * up)`: keeps gate, up and weight, makes the product again in backward."""
    tape, weight, bias = context.tape, context.weights[f"{name}.weight"], context.weights.get(f"{name}.bias")
    memory = kernel_memory(context, _linear_kernel(context.spec) or "", gate, weight)
    read = _cast_weight(context, weight, gate.width)
    parameters: tuple[Tensor, ...] = (read,) if bias is None else (read, bias)
    # what it holds beside one element that stands for the result is the product
    product_bytes = memory.forward_temporary_bytes - gate.width
    makes = memory.backward_gradient_bytes > (weight.size_bytes if weight.trainable else 0)
    kept = tape.run(
        Operation(
            elements=1,
            width=gate.width,
            inputs=(*parameters, gate, up) if makes else parameters,
            reuses=() if makes else (gate, up),
            saves=(gate, up, read),
            backward_scratch_bytes=product_bytes,
            scratch_role=Role.KERNEL_WORKSPACE,
            is_product=True,
            in_function=True,
        )
    )
    output = tape.run(
        Operation(
            elements=context.tokens * (weight.elements * context.tokens // gate.elements),
            width=gate.width,
            passes=(kept,),
            forward_scratch_bytes=product_bytes,
            scratch_role=Role.KERNEL_WORKSPACE,
            is_product=True,
            in_function=True,
        )
    )
    tape.release(kept)
    if isinstance(read, Value):
        tape.release(read)
    return output


def _cast_weight(context: Context, weight: Weight, width: int) -> Tensor:
    """Autocast's copy of the weight, which the kernel makes itself and autocast does not keep."""
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
