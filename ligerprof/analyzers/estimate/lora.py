"""LoRA as peft adds it: two thin fp32 matrices beside each frozen linear layer of a block."""

from collections.abc import Iterator

from ligerprof.analyzers.estimate.context import FP32_BYTES, Context
from ligerprof.analyzers.estimate.operations import add, linear, renamed, scale
from ligerprof.analyzers.estimate.tape import Value, Weight
from ligerprof.errors import RecipeError
from ligerprof.recipe import TrainingRecipe

_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapter_weights(recipe: TrainingRecipe) -> Iterator[tuple[str, Weight]]:
    """Names and weights of the adapters; peft keeps them in fp32 whatever the model's dtype is.

    Raises:
        RecipeError: the model has none of the layers that are adapted.
    """
    if recipe.lora is None:
        return
    targets = [
        item for item in recipe.spec.parameters if item.name.endswith(tuple(f".{name}.weight" for name in _TARGETS))
    ]
    if not targets:
        raise RecipeError(f"--lora adapts {', '.join(_TARGETS)}: {recipe.spec.name} has none of them.")
    for item in targets:
        layer = item.name.removesuffix(".weight")
        yield f"{layer}.lora_A", Weight(recipe.lora * item.shape[1], FP32_BYTES)
        yield f"{layer}.lora_B", Weight(recipe.lora * item.shape[0], FP32_BYTES)


def add_adapter(context: Context, value: Value, result: Value, name: str) -> Value:
    """`result + lora_B(lora_A(x)) * scaling`, cast back to the dtype of `result` (peft's lora.Linear.forward)."""
    tape = context.tape
    read = context.cast(value, FP32_BYTES)
    thin = linear(context, read, context.weights[f"{name}.lora_A"])
    wide = renamed(context, thin, linear(context, thin, context.weights[f"{name}.lora_B"]))
    scaled = renamed(context, wide, scale(context, wide))
    total = add(context, result, scaled)
    tape.release(scaled)
    output = context.cast(total, result.width)
    tape.release(read, total, result)
    return output
