"""The groups of parameters that FSDP gathers and reduces together, for the modules that the recipe wraps."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ligerprof.analyzers.estimate.hooks import Module, Part
from ligerprof.analyzers.estimate.places import WHOLE
from ligerprof.analyzers.estimate.tensors import Weight
from ligerprof.analyzers.estimate.traced import traced_layers
from ligerprof.recipe.categories import Engine, Wrap
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.torch_memory.distributed import FlatSizes, GroupSizes, ShardedParameter
from ligerprof.torch_memory.dtypes import DTYPE_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The parameters of one `fully_shard` call, or of one FullyShardedDataParallel.

    Attributes:
        modules: its modules in the order of their forward passes; the first one gathers, the last one reshards.
        weights: its parameters.
        sizes: its buffers.
        reshards: whether the gathered parameters are freed after forward.
        place: the part of the model that its gradients belong to.
    """

    modules: tuple[Module, ...]
    weights: tuple[Weight, ...]
    sizes: GroupSizes
    reshards: bool
    place: str


def groups(recipe: TrainingRecipe, weights: Mapping[str, Weight]) -> Iterator[Group]:
    """The groups of the traced layers and of the other modules, the root's first, as torch lists them."""
    named = {name: weight for name, weight in weights.items() if weight.layer is None}
    for modules, taken, reshards in _outer_groups(recipe, named):
        if taken:
            yield _group(recipe, modules, taken, reshards=reshards, place=WHOLE)
    for repetition in traced_layers(recipe):
        for index in repetition.indices:
            inside = [weight for weight in weights.values() if weight.layer == index]
            yield _group(recipe, (index,), inside, reshards=recipe.reshard, place=repetition.place(index))


def shard_sizes(recipe: TrainingRecipe, weights: Iterable[Weight]) -> list[int]:
    """Bytes of each tensor that holds a rank's shards, with their padding."""
    if recipe.engine is Engine.FSDP1:
        return [sizes.gradient_bytes for sizes in flat_sizes(recipe, weights)]
    return [sharded_parameter(recipe, weight).storage_bytes for weight in weights]


def trained_shards(recipe: TrainingRecipe, weights: Iterable[Weight]) -> Iterator[tuple[Weight, tuple[int, ...]]]:
    """Weights and the shapes of their shards, which the optimizer works on, of the rank that has most."""
    if recipe.engine is Engine.FSDP1:
        for unit in _units(weights):
            found = zip(unit, _flat(recipe, unit).slices(), strict=True)
            yield from ((weight, (elements,)) for weight, elements in found if elements)
        return
    for weight in weights:
        yield weight, sharded_parameter(recipe, weight).shard_shape()


def sharded_parameter(recipe: TrainingRecipe, weight: Weight) -> ShardedParameter:
    """A weight as FSDP shards it over the recipe's GPUs."""
    return ShardedParameter(
        shape=weight.shape,
        shards=recipe.shards,
        stored_bytes=DTYPE_BYTES[recipe.weight_dtype],
        gathered_bytes=weight.width,
        trainable=weight.trainable,
    )


def _outer_groups(
    recipe: TrainingRecipe, named: Mapping[str, Weight]
) -> Iterator[tuple[tuple[Module, ...], list[Weight], bool]]:
    """Modules, weights and resharding of each group outside the decoder layers.

    accelerate 1.15, fsdp2_prepare_model: final norm and head are one group that is not resharded, with the embedding
    if they share its weight; so is what is left for the root.
    """
    if recipe.wrap is Wrap.LAYERS:
        # FSDP1 never frees the root's weights after forward (_post_forward_reshard)
        yield (Part.ROOT,), list(named.values()), recipe.reshard and recipe.engine is not Engine.FSDP1
        return
    row = recipe.spec.architecture
    embedding = [weight for name, weight in named.items() if _belongs(name, row.embedding)]
    tail = [weight for name, weight in named.items() if _belongs(name, row.final_norm) or _belongs(name, row.head)]
    rest = [weight for weight in named.values() if weight not in embedding and weight not in tail]
    yield (Part.ROOT,), rest, False
    if recipe.spec.tied_embeddings:
        # accelerate lists the norm first; the reduction holds the gradient of the last weight
        head = [weight for name, weight in named.items() if _belongs(name, row.head)]
        norm = [weight for weight in tail if weight not in head]
        yield (Part.EMBEDDING, Part.NORM, Part.HEAD), [*norm, *embedding, *head], False
        return
    yield (Part.EMBEDDING,), embedding, recipe.reshard
    yield (Part.NORM, Part.HEAD), tail, False


def _belongs(parameter: str, module: str) -> bool:
    return parameter.startswith(f"{module}.")


def _group(
    recipe: TrainingRecipe, modules: tuple[Module, ...], weights: Sequence[Weight], *, reshards: bool, place: str
) -> Group:
    sizes = (_flat if recipe.engine is Engine.FSDP1 else _sizes)(recipe, weights)
    return Group(modules=modules, weights=tuple(weights), sizes=sizes, reshards=reshards, place=place)


def _sizes(recipe: TrainingRecipe, weights: Sequence[Weight]) -> GroupSizes:
    parameters = tuple(sharded_parameter(recipe, weight) for weight in weights)
    return GroupSizes(parameters=parameters, reduce_bytes=DTYPE_BYTES[recipe.reduction_dtype])


def flat_sizes(recipe: TrainingRecipe, weights: Iterable[Weight]) -> list[FlatSizes]:
    """The sizes of each unit of FSDP1 in the order in which they are made: the decoder layers, then the root."""
    root_last = sorted(_units(weights), key=lambda unit: unit[0].layer is None)
    return [_flat(recipe, unit) for unit in root_last]


def _flat(recipe: TrainingRecipe, weights: Sequence[Weight]) -> FlatSizes:
    parameters = tuple(sharded_parameter(recipe, weight) for weight in weights)
    return FlatSizes(parameters=parameters, reduce_bytes=DTYPE_BYTES[recipe.reduction_dtype])


def _units(weights: Iterable[Weight]) -> Iterable[list[Weight]]:
    """The weights of each decoder layer, and those of the root."""
    units: dict[int | None, list[Weight]] = {}
    for weight in weights:
        units.setdefault(weight.layer, []).append(weight)
    return units.values()
