"""Memory on one of N GPUs under DeepSpeed, with or without ZeRO: what stays, and the temporaries of a step."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ligerprof.analyzers.estimate.bucket import bucket_flushes, scattered_elements
from ligerprof.analyzers.estimate.gathered import Gathered, GatheredOnDemand, NothingGathered
from ligerprof.analyzers.estimate.partition import Elements, count_elements, part, weight_width
from ligerprof.analyzers.estimate.partitioned import own_weights
from ligerprof.analyzers.estimate.placement import Bytes, Placement
from ligerprof.analyzers.estimate.tensors import Weight
from ligerprof.analyzers.estimate.traced import TracedLayers, traced_layers
from ligerprof.errors import UnsupportedError
from ligerprof.models import ParameterShape
from ligerprof.models.architectures import is_in_layer, layer_index
from ligerprof.recipe.categories import Offload
from ligerprof.recipe.deepspeed import zero_settings
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Role
from ligerprof.torch_memory.dtypes import FP32_BYTES
from ligerprof.torch_memory.optimizers import moment_count, step_copies

_FP64_BYTES = 8


def zero_placement(recipe: TrainingRecipe, weights: Iterable[Weight], *, first: bool, rank: int) -> Placement:
    """A rank's memory under the recipe's ZeRO stage, in the first step or a steady one.

    Raises:
        UnsupportedError: quantized weights, 8-bit or projected moments.
    """
    _require_known(recipe)
    weights = list(weights)
    if recipe.zero in (1, 2):
        return _stage_1_or_2(recipe, weights, first=first, rank=rank)
    elements = count_elements(recipe, weights)
    if recipe.zero == 0:
        return _stage_0(recipe, elements) if recipe.precision.is_mixed else _stage_0_in_fp32(recipe, elements, first)
    return _stage_3(recipe, elements, first=first)


def _require_known(recipe: TrainingRecipe) -> None:
    optimizer = recipe.optimizer
    for given, what, instead in (
        (recipe.qlora is not None, "--qlora with --engine deepspeed", "use --lora"),
        (
            recipe.quantization is not None,
            f"--quantization {recipe.quantization} with --engine deepspeed",
            "leave it out",
        ),
        (not optimizer.row.is_partitioned, f"--optimizer {optimizer} with --engine deepspeed", "use adamw-fused"),
        (not zero_settings(recipe)["contiguous_gradients"], "contiguous_gradients off", "switch it on"),
    ):
        if given:
            raise UnsupportedError(f"estimate: {what} is not supported yet; {instead}.")


def _stage_0(recipe: TrainingRecipe, elements: Elements) -> Placement:
    """No ZeRO: an fp32 copy of each tensor, with states created at once (fp16/unfused_optimizer.py).

    The step allocates an fp32 gradient for each copy.
    """
    return Placement(
        resident={
            Role.PARAMETERS: weight_width(recipe) * elements.whole,
            Role.OPTIMIZER_STATES: FP32_BYTES * elements.trained + _state_bytes(recipe, elements.trained),
        },
        states={},
        updates=(_stepping(recipe, elements.trained),),
    )


def _stage_0_in_fp32(recipe: TrainingRecipe, elements: Elements, first: bool) -> Placement:
    """No ZeRO and no copies: the optimizer steps on the weights (engine.py, _do_optimizer_sanity_check).

    After backward, gradients are reduced in flat copies (engine.py, allreduce_no_retain).
    """
    states = {Role.OPTIMIZER_STATES: _state_bytes(recipe, elements.trained)}
    temporaries = {Role.OPTIMIZER_TEMPORARIES: FP32_BYTES * step_copies(recipe.optimizer) * elements.trained}
    return Placement(
        resident={Role.PARAMETERS: FP32_BYTES * elements.whole},
        states=states,
        last_reduction={Role.COMMUNICATION: FP32_BYTES * elements.most_reduced},
        updates=(Counter(states) + Counter(temporaries) if first else temporaries,),
    )


def _stage_1_or_2(recipe: TrainingRecipe, weights: Sequence[Weight], *, first: bool, rank: int) -> Placement:
    """Stage 1 partitions the fp32 copy and the moments, stage 2 the gradients too: `PartitionedHooks`."""
    elements = count_elements(recipe, weights)
    offloaded, trained = recipe.offload is not Offload.NONE, elements.trained_share
    own = own_weights(recipe, [weight for weight in weights if weight.trainable], rank)
    kept_bytes = sum(weight.size_bytes for weight, _ in own)
    return Placement(
        resident={
            Role.PARAMETERS: weight_width(recipe) * elements.whole,
            Role.OPTIMIZER_STATES: 0 if offloaded else FP32_BYTES * trained,
            # temp_grad_buffer_for_gpu_offload: gradients are copied through it to main memory
            Role.COMMUNICATION: weight_width(recipe) * elements.largest if offloaded else 0,
        },
        states={Role.OPTIMIZER_STATES: 0 if offloaded else _state_bytes(recipe, trained)},
        gradients_at_update=0,
        updates=()
        if offloaded
        else (
            _normed(max((share for _, share in own), default=0), kept_bytes),
            *_updates(recipe, (trained,), first=first, kept_bytes=kept_bytes),
        ),
    )


def _stage_3(recipe: TrainingRecipe, elements: Elements, *, first: bool) -> Placement:
    """Stage 3 partitions the weights as well (stage3.py) and gathers them (gathered.py)."""
    offloaded, moved = recipe.offload is not Offload.NONE, recipe.offload.moves_parameters
    trained = elements.trained_share
    if recipe.gpus == 1 and not moved:
        gathered: NothingGathered = NothingGathered()
    else:
        # the second micro-batch prefetches
        gathered = GatheredOnDemand(recipe) if first and recipe.grad_accum == 1 else Gathered(recipe)
    at_loss_bytes, in_layers_bytes = weight_width(recipe) * gathered.at_loss(), _most_in_layers_bytes(recipe, gathered)
    in_embedding_bytes = weight_width(recipe) * gathered.in_layers(recipe.spec.layers)
    shard_bytes = weight_width(recipe) * gathered.largest_call() // recipe.gpus if moved and recipe.gpus > 1 else 0
    return Placement(
        resident={
            Role.PARAMETERS: 0 if moved else weight_width(recipe) * elements.share,
            Role.OPTIMIZER_STATES: 0 if offloaded else FP32_BYTES * trained,
            # partitioned gradients and the bucket have flat buffers from the start
            Role.GRADIENTS: 0 if offloaded else weight_width(recipe) * trained,
            Role.COMMUNICATION: _bucket_bytes(recipe),
        },
        states={Role.OPTIMIZER_STATES: 0 if offloaded else _state_bytes(recipe, trained)},
        running={Role.COMMUNICATION: at_loss_bytes},
        flat_copies=[gathered.flat_copies(layer) for layer in range(recipe.spec.layers)],
        in_layers={Role.COMMUNICATION: in_layers_bytes - at_loss_bytes},
        in_embedding={Role.COMMUNICATION: min(in_embedding_bytes - at_loss_bytes, 0)},
        # this rank's share of one gather, on its way from main memory to the other ranks
        arriving={Role.COMMUNICATION: in_layers_bytes - at_loss_bytes + shard_bytes},
        # adapters' gradients are too small to count
        reductions={} if recipe.lora is not None else _reductions(recipe, gathered),
        last_reduction={} if recipe.lora is not None else _last_scattering(recipe, gathered),
        gradient_share=0.0,
        gathered={name: weight_width(recipe) * elements for name, elements in gathered.while_read().items()},
        released=gathered.released(),
        updates=()
        if offloaded
        else (_normed(part(recipe, elements.largest)), *_updates(recipe, elements.groups, first=first)),
    )


def _bucket_bytes(recipe: TrainingRecipe) -> int:
    bucket_bytes: int = weight_width(recipe) * zero_settings(recipe)["reduce_bucket_size"]
    return bucket_bytes


def _most_in_layers_bytes(recipe: TrainingRecipe, gathered: NothingGathered) -> int:
    """Gathered weights during backward of the layers, where they most exceed what earlier layers have freed."""
    return max(
        weight_width(recipe) * gathered.in_layers(passed) - _freed_bytes(recipe, passed)
        for passed in range(recipe.spec.layers if recipe.checkpointing else 1)
    )


def _freed_bytes(recipe: TrainingRecipe, layers: int) -> int:
    """Checkpoints of layers that have run backward."""
    return layers * recipe.tokens * recipe.spec.hidden_size * weight_width(recipe)


def _reductions(recipe: TrainingRecipe, gathered: NothingGathered) -> dict[str, int]:
    """By parameter, what stage 3 allocates when its gradient arrives, beyond what is already counted.

    The maximum over all layers that a traced layer represents, less what those that have run have freed.
    """
    most: dict[str, int] = {}
    inside: dict[int, list[str]] = {}
    for item in recipe.spec.parameters:
        if (layer := layer_index(item.name)) is not None:
            inside.setdefault(layer, []).append(item.name)
    traced = traced_layers(recipe)
    in_layers_bytes = _most_in_layers_bytes(recipe, gathered)
    for flush in bucket_flushes(recipe):
        if flush.waiting is None:
            continue
        name, passed, freed = _arrival(recipe, inside, traced, flush.waiting)
        if freed and not recipe.checkpointing:
            # those layers have freed more than this
            continue
        held_bytes = weight_width(recipe) * (
            scattered_elements(recipe, flush, with_held=False) + gathered.in_layers(passed)
        )
        counted_bytes = in_layers_bytes if is_in_layer(name) else weight_width(recipe) * gathered.at_loss()
        most[name] = max(most.get(name, 0), held_bytes - counted_bytes - _freed_bytes(recipe, freed))
    return most


def _arrival(
    recipe: TrainingRecipe, inside: Mapping[int, Sequence[str]], traced: TracedLayers, waiting: ParameterShape
) -> tuple[str, int, int]:
    """When a parameter's gradient arrives.

    Args:
        inside: the names of each layer's parameters.

    Returns:
        The parameter's name in the traced layer that represents its own, the number of layers that have run backward,
        and how many of these the traced layer represents.
    """
    layers, layer = recipe.spec.layers, layer_index(waiting.name)
    if layer is None:
        # the embedding is before the layers, so after them in backward; norm and head are the opposite
        is_embedding = recipe.spec.parameters.index(waiting) <= sum(map(len, inside.values()))
        return waiting.name, layers if is_embedding else 0, 0
    repetition = next(item for item in traced if layer < item.end)
    index = repetition.representative(layer)
    place = inside[layer].index(waiting.name)
    # the traced layer runs backward in place of the last group's
    represented = repetition.end - repetition.period + index - repetition.first
    return inside[index][place], layers - 1 - layer, represented - layer


def _last_scattering(recipe: TrainingRecipe, gathered: NothingGathered) -> Bytes:
    """The last flush in stage 3, with the embedding still gathered."""
    *_, last = bucket_flushes(recipe)
    elements = scattered_elements(recipe, last, with_held=True) + gathered.in_layers(recipe.spec.layers)
    return {Role.COMMUNICATION: weight_width(recipe) * elements}


def _state_bytes(recipe: TrainingRecipe, share: int) -> int:
    return moment_count(recipe.optimizer) * FP32_BYTES * share


def _normed(elements: int, kept_bytes: int = 0) -> Bytes:
    """The norm of the gradients casts one after another to fp64 (get_grad_norm_direct).

    Args:
        elements: of the largest one.
        kept_bytes: gradients that are held then.
    """
    return {Role.GRADIENTS: kept_bytes, Role.OPTIMIZER_TEMPORARIES: _FP64_BYTES * elements}


def _updates(recipe: TrainingRecipe, groups: Iterable[int], *, first: bool, kept_bytes: int = 0) -> Iterator[Bytes]:
    """Per group, gradients are flattened and, if they are not in fp32, cast to it; then the optimizer steps.

    In between, stages 1 and 2 free the gradients, and all stages the flat copy of 16 bits (step and
    _prepare_fp32_grad_for_sub_group). The first step creates a group's moments only then.

    Args:
        kept_bytes: gradients that are held until then.
    """
    made: Bytes = {}
    flat_width = weight_width(recipe) if recipe.precision.is_mixed else 0
    for elements in groups:
        flat_bytes = (flat_width + FP32_BYTES) * elements
        yield Counter(made) + Counter({Role.GRADIENTS: kept_bytes, Role.OPTIMIZER_TEMPORARIES: flat_bytes})
        if first:
            made = Counter(made) + Counter({Role.OPTIMIZER_STATES: _state_bytes(recipe, elements)})
        yield Counter(made) + Counter(_stepping(recipe, elements))


def _stepping(recipe: TrainingRecipe, elements: int) -> Bytes:
    """fp32 gradients, and foreach AdamW's square roots."""
    copies = 1 + step_copies(recipe.optimizer)
    return {Role.OPTIMIZER_TEMPORARIES: copies * FP32_BYTES * elements}


def zero_copies(recipe: TrainingRecipe) -> tuple[tuple[int, bool], ...]:
    """(bytes per parameter, whether not sharded) of weights, optimizer states and gradients."""
    on_gpu = recipe.offload is Offload.NONE
    return (
        (0 if recipe.offload.moves_parameters else weight_width(recipe), recipe.zero < 3),
        (FP32_BYTES * (1 + moment_count(recipe.optimizer)) if on_gpu else 0, recipe.zero == 0),
        (weight_width(recipe) if on_gpu else 0, recipe.zero < 2),
    )
