"""The weights of a model, and the tensors of a batch."""

import dataclasses
import math
from collections.abc import Iterator, Mapping

from ligerprof.analyzers.estimate.lora import ORIGINAL, adapter_weights, is_quantized
from ligerprof.analyzers.estimate.tensors import Weight
from ligerprof.models import ParameterShape
from ligerprof.models.architectures import is_embedding_weight, layer_index
from ligerprof.models.spec import Task
from ligerprof.models.tape import Tape
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.torch_memory.dtypes import DTYPE_BYTES, FP32_BYTES, INDEX_BYTES
from ligerprof.torch_memory.low_bit import int8_sizes, nf4_sizes


def make_weights(recipe: TrainingRecipe) -> dict[str, Weight]:
    """All parameters of the model by their names in transformers, in the order of the model's modules."""
    if recipe.spec.tape is not None:
        return _traced_weights(recipe.spec.tape)
    width = DTYPE_BYTES[recipe.gathered_dtype]
    adapters = dict(adapter_weights(recipe))

    def packed_sizes(item: ParameterShape) -> tuple[int, ...]:
        if recipe.packed_bits is None or not is_quantized(recipe.spec, item.name):
            return ()
        if recipe.packed_bits == 4:
            return nf4_sizes(item.elements, nested=recipe.nested_quant)
        outputs, inputs = item.shape
        return int8_sizes(outputs, inputs)

    weights = {
        item.name: Weight(
            item.elements,
            FP32_BYTES if item.fp32 else width,
            trainable=item.trained and not adapters,
            shape=item.shape,
            layer=layer_index(item.name),
            in_embedding=is_embedding_weight(item.name),
            packed_sizes=packed_sizes(item),
        )
        for item in recipe.spec.parameters
    }
    if recipe.spec.tied_embeddings:
        weights[recipe.spec.parameters[0].name].uses = 2
    for name in list(weights):
        if recipe.trains_in_full(name.rpartition(".")[0]):
            _copy_and_train(weights, name, FP32_BYTES if recipe.fp32_saved_modules else weights[name].width)
    head = recipe.spec.architecture.head
    if recipe.spec.tied_embeddings and recipe.trains_in_full(head):
        _untie(
            weights,
            recipe.spec.parameters[0].name,
            f"{head}.weight",
            FP32_BYTES if recipe.fp32_saved_modules else width,
        )
    return dict(_after_their_layers(weights, adapters))


def _traced_weights(tape: Tape) -> dict[str, Weight]:
    """The parameters of a traced model, its adapters among them."""
    return {
        item.name: Weight(
            math.prod(item.shape),
            item.width,
            trainable=item.trained,
            shape=item.shape,
            layer=tape.owner_of(item.name),
            is_adapter=".lora_" in item.name,
        )
        for item in tape.parameters
    }


def _after_their_layers(weights: Mapping[str, Weight], adapters: Mapping[str, Weight]) -> Iterator[tuple[str, Weight]]:
    """Weights, each followed by the adapters of its module; a tied head has no weight of its own and comes last."""
    of_module: dict[str, list[tuple[str, Weight]]] = {}
    for name, adapter in adapters.items():
        of_module.setdefault(name.rpartition(".")[0], []).append((name, adapter))
    for name, weight in weights.items():
        yield name, weight
        yield from of_module.pop(name.rpartition(".")[0], ())
    for left in of_module.values():
        yield from left


def _copy_and_train(weights: dict[str, Weight], name: str, width: int) -> None:
    """Peft's ModulesToSaveWrapper: a copy is trained in the place of the weight, which stays."""
    original = weights[name]
    module, _, parameter = name.rpartition(".")
    weights[f"{module}.{ORIGINAL}.{parameter}"] = original
    weights[name] = dataclasses.replace(original, width=width, trainable=True, uses=1)


def _untie(weights: dict[str, Weight], embedding: str, head: str, width: int) -> None:
    """A tied head that is trained gets a copy of its own."""
    tied = weights[embedding]
    tied.uses = 1
    weights[head] = dataclasses.replace(tied, width=width, trainable=True, uses=1, in_embedding=False)


def input_sizes(recipe: TrainingRecipe) -> Iterator[int]:
    """Bytes of each tensor of the batch: tokens, which are also the labels, or labels and a mask or positions."""
    yield recipe.tokens * INDEX_BYTES
    if not recipe.spec.task.predicts_tokens:
        if recipe.padding:
            yield recipe.tokens * INDEX_BYTES
        labels = recipe.batch if recipe.spec.task is Task.SEQUENCES else recipe.tokens
        regresses = recipe.spec.task is Task.SEQUENCES and recipe.spec.labels == 1
        yield labels * (FP32_BYTES if regresses else INDEX_BYTES)
        return
    if recipe.padding or recipe.packing:
        yield recipe.tokens * INDEX_BYTES
        yield recipe.tokens * INDEX_BYTES
