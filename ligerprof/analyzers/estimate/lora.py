"""LoRA as in peft: two thin fp32 matrices for each adapted linear layer of a decoder layer."""

from collections.abc import Iterator
from math import prod

from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.operations import add, linear, renamed, scale
from ligerprof.analyzers.estimate.tensors import Value, Weight
from ligerprof.errors import RecipeError
from ligerprof.models import ModelSpec
from ligerprof.recipe.categories import Engine
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.torch_memory.dtypes import DTYPE_BYTES, FP32_BYTES

# peft's name for the module that a trained copy replaces
ORIGINAL = "original_module"


def adapter_weights(recipe: TrainingRecipe) -> Iterator[tuple[str, Weight]]:
    """Names and weights of the adapters, which peft creates in fp32 for any dtype of the model.

    Raises:
        RecipeError: the model has no layers that LoRA adapts.
    """
    rank = adapter_rank(recipe)
    if rank is None:
        return
    # DeepSpeed casts the whole model to its 16-bit dtype, and FSDP2's mixed precision what it gathers
    casts = recipe.engine is Engine.DEEPSPEED or recipe.casts_gathered
    width = DTYPE_BYTES[recipe.gathered_dtype] if casts else FP32_BYTES
    targets = [item for item in recipe.spec.parameters if is_weight_of(recipe.adapted_layers, item.name)]
    if not targets:
        raise RecipeError(f"LoRA adapts the linear layers of decoder layers: {recipe.spec.name} has none.")
    for item in targets:
        layer = item.name.removesuffix(".weight")
        shapes = {"A": (rank, item.shape[1]), "B": (item.shape[0], rank)}
        for part, shape in shapes.items():
            yield f"{layer}.lora_{part}", _adapter(shape, width)
        if recipe.dora:
            yield f"{layer}.lora_magnitude", _adapter(item.shape[:1], width)


def _adapter(shape: tuple[int, ...], width: int) -> Weight:
    return Weight(prod(shape), width, shape=shape, in_layer=True, is_adapter=True)


def adapter_rank(recipe: TrainingRecipe) -> int | None:
    """The rank of LoRA or QLoRA, None without either."""
    return recipe.lora or recipe.qlora


def is_quantized(spec: ModelSpec, name: str) -> bool:
    """Whether QLoRA quantizes a parameter: the weights of all linear layers of decoder layers, adapted or not."""
    return is_weight_of(spec.architecture.lora_targets, name)


def is_weight_of(layers: tuple[str, ...], name: str) -> bool:
    """Whether a parameter is the weight of one of these modules."""
    return name.endswith(tuple(f".{layer}.weight" for layer in layers))


def add_adapter(context: Context, value: Value, result: Value, name: str) -> Value:
    """`result + lora_B(lora_A(x)) * scaling`, cast back to the dtype of `result` (peft's lora.Linear.forward)."""
    tape = context.tape
    read = context.cast(value, context.weights[f"{name}.lora_A"].width)
    scaled = _scaled_product(context, read, name)
    total = add(context, result, scaled)
    tape.release(scaled)
    output = context.cast(total, result.width)
    tape.release(read, total, result)
    return output


def add_adapter_to_quantized(context: Context, value: Value, result: Value, name: str) -> Value:
    """The same for 4-bit weights (peft's lora/bnb.py, Linear4bit.forward).

    The result is cloned first. Without autocast, the input is cast to the adapter's dtype, and its output is cast back.
    """
    tape, converts = context.tape, context.half_bytes is None
    cloned = tape.run(Operation(elements=result.elements, width=result.width, passes=(result,)))
    tape.release(result)
    read = context.cast(value, FP32_BYTES) if converts else tape.name(value)
    scaled = _scaled_product(context, read, name)
    if converts:
        scaled = renamed(context, scaled, context.cast(scaled, result.width))
    output = add(context, cloned, scaled)
    tape.release(read, scaled, cloned)
    return output


def _scaled_product(context: Context, read: Value, name: str) -> Value:
    thin = linear(context, read, context.weights[f"{name}.lora_A"])
    wide = renamed(context, thin, linear(context, thin, context.weights[f"{name}.lora_B"]))
    return renamed(context, wide, scale(context, wide))
