"""LoRA as in peft: two thin matrices for each adapted linear layer, for the head and for the embedding."""

from collections.abc import Iterator, Mapping
from math import prod

from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.operations import add, dropout, linear, renamed, scale
from ligerprof.analyzers.estimate.tensors import Value, Weight
from ligerprof.errors import RecipeError
from ligerprof.models import ModelSpec
from ligerprof.models.architectures import layer_index
from ligerprof.recipe.categories import Engine
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Role
from ligerprof.torch_memory.dtypes import DTYPE_BYTES
from ligerprof.torch_memory.sorting import embedding_scratch

# peft's name for the module that a trained copy replaces
ORIGINAL = "original_module"


def head_weight_name(spec: ModelSpec, weights: Mapping[str, Weight]) -> str:
    """The head's weight, which is the embedding's if they are tied; adapters may come with trained copies of either."""
    row = spec.architecture
    own, untrained = f"{row.head}.weight", f"{row.embedding}.{ORIGINAL}.weight"
    tied = untrained if untrained in weights else f"{row.embedding}.weight"
    return tied if spec.tied_embeddings and own not in weights else own


def adapter_weights(recipe: TrainingRecipe) -> Iterator[tuple[str, Weight]]:
    """Names and weights of the adapters, which peft creates in fp32 for any dtype of the model, unless told otherwise.

    Raises:
        RecipeError: the model has no layers that LoRA adapts.
    """
    rank = adapter_rank(recipe)
    if rank is None:
        return
    # DeepSpeed casts the whole model to its 16-bit dtype, and FSDP2's mixed precision what it gathers
    casts = recipe.engine is Engine.DEEPSPEED or recipe.casts_gathered
    width = DTYPE_BYTES[recipe.gathered_dtype if casts else recipe.adapter_dtype]
    targets = list(_adapted_weights(recipe))
    if not targets:
        raise RecipeError(f"LoRA adapts the linear layers of decoder layers: {recipe.spec.name} has none.")
    for layer, (outputs, inputs) in targets:
        shapes: dict[str, tuple[int, ...]] = {"A": (rank, inputs), "B": (outputs, rank)}
        if recipe.dora:
            shapes["magnitude"] = (outputs,)
        for part, shape in shapes.items():
            weight = Weight(prod(shape), width, shape=shape, layer=layer_index(layer), is_adapter=True)
            yield f"{layer}.lora_{part}", weight


def _adapted_weights(recipe: TrainingRecipe) -> Iterator[tuple[str, tuple[int, int]]]:
    """Modules with adapters and the outputs and inputs of their weights; an embedding has a word as its input."""
    spec, row = recipe.spec, recipe.spec.architecture
    for item in spec.parameters:
        module = item.name.removesuffix(".weight")
        if module == row.embedding and recipe.adapts_embedding:
            yield module, (item.shape[1], item.shape[0])
        elif is_weight_of(recipe.adapted_layers, item.name):
            yield module, (item.shape[0], item.shape[1])
    # a tied head has no parameter of its own in the list
    if recipe.adapts_head:
        yield row.head, (spec.vocab_size, spec.hidden_size)


def adapter_rank(recipe: TrainingRecipe) -> int | None:
    """The rank of LoRA or QLoRA, None without either."""
    return recipe.lora or recipe.qlora


def is_quantized(spec: ModelSpec, name: str) -> bool:
    """Whether QLoRA and the like quantize a parameter: weights of linear layers of decoder layers, adapted or not."""
    return is_weight_of(spec.architecture.linear_layers, name)


def is_weight_of(layers: tuple[str, ...], name: str) -> bool:
    """Whether a parameter is the weight of one of these modules."""
    return name.endswith(tuple(f".{layer}.weight" for layer in layers))


def add_adapter(
    context: Context,
    value: Value,
    result: Value,
    name: str,
    *,
    role: Role = Role.ACTIVATIONS,
    gradient_role: Role = Role.ACTIVATIONS,
) -> Value:
    """`result + lora_B(lora_A(x)) * scaling`, cast back to the dtype of `result` (peft's lora.Linear.forward)."""
    read = context.cast(value, context.weights[f"{name}.lora_A"].width)
    output = _with_product(context, result, _scaled_product(context, read, name, role, gradient_role), role)
    context.tape.release(read)
    return output


def add_adapter_to_embedding(context: Context, result: Value, name: str, role: Role) -> Value:
    """The same for an embedding: `lora_A` is a second table (peft's lora.Embedding.forward)."""
    table, tape = context.weights[f"{name}.lora_A"], context.tape
    rank, words = table.shape
    tokens = result.elements // context.spec.hidden_size
    sorting, summing = embedding_scratch(tokens, words, rank)
    thin = tape.run(
        Operation(
            elements=tokens * rank,
            width=table.width,
            inputs=(table,),
            other_saves=1,
            leading_gradient_scratch=sorting,
            backward_scratch_bytes=summing,
            # the table is read transposed, and autograd copies a gradient whose strides differ from its parameter's
            reduction_scratch_bytes=table.size_bytes,
        )
    )
    wide = renamed(context, thin, linear(context, thin, context.weights[f"{name}.lora_B"]))
    return _with_product(context, result, renamed(context, wide, scale(context, wide)), role)


def _with_product(context: Context, result: Value, scaled: Value, role: Role) -> Value:
    total = add(context, result, scaled, role=role)
    context.tape.release(scaled, result)
    output = context.cast(total, result.width, role=role)
    context.tape.release(total)
    return output


def head_factors(context: Context, value: Value, name: str) -> tuple[Value, Value]:
    """What the fused loss takes of a head's adapter (kernels/patching): `lora_A(x) * scaling` and `lora_B`.

    The second is computed from an identity matrix.
    """
    tape, narrow, wide = context.tape, context.weights[f"{name}.lora_A"], context.weights[f"{name}.lora_B"]
    read = context.cast(value, narrow.width)
    thin = thin_product(context, read, name)
    thin = renamed(context, thin, scale(context, thin))
    tape.release(read)
    rank, words = narrow.shape[0], wide.shape[0]
    identity = tape.run(Operation(elements=rank * rank, width=wide.width))
    read_weight, rows = context.autocast_weight(wide), context.autocast(identity)
    factor = tape.run(
        Operation(
            elements=rank * words,
            width=rows.width,
            inputs=(read_weight,),
            saves=(rows,),
            gradient_is_view=True,
            is_product=True,
        )
    )
    tape.release(identity, rows)
    return thin, factor


def add_adapter_to_quantized(context: Context, value: Value, result: Value, name: str) -> Value:
    """The same for 4-bit and 8-bit weights (peft's lora/bnb.py, Linear4bit.forward and Linear8bitLt.forward).

    The result of 4-bit weights is cloned first. Without autocast, the input is cast to the adapter's dtype, and its
    output is cast back.
    """
    tape, converts = context.tape, context.half_bytes is None
    if context.recipe.packed_bits == 4:
        result = renamed(
            context, result, tape.run(Operation(elements=result.elements, width=result.width, passes=(result,)))
        )
    read = context.cast(value, context.weights[f"{name}.lora_A"].width) if converts else tape.name(value)
    scaled = _scaled_product(context, read, name, Role.ACTIVATIONS, Role.ACTIVATIONS)
    if converts:
        scaled = renamed(context, scaled, context.cast(scaled, result.width))
    output = add(context, result, scaled)
    tape.release(read, scaled, result)
    return output


def _scaled_product(context: Context, read: Value, name: str, role: Role, gradient_role: Role) -> Value:
    thin = thin_product(context, read, name)
    wide = linear(context, thin, context.weights[f"{name}.lora_B"], role=role, gradient_role=gradient_role)
    wide = renamed(context, thin, wide)
    return renamed(context, wide, scale(context, wide, role=role))


def thin_product(context: Context, value: Value, name: str) -> Value:
    """`lora_A(dropout(x))`: each adapter drops its own elements of an input that several share."""
    dropped = dropout(context, value, context.recipe.lora_dropout)
    return renamed(context, dropped, linear(context, dropped, context.weights[f"{name}.lora_A"]))
