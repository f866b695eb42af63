"""Memory on one of N GPUs under DeepSpeed, with or without ZeRO: what stays, and the temporaries of a step."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from ligerprof.analyzers.estimate.partition import Elements, count_elements, part, weight_width
from ligerprof.analyzers.estimate.partitioned import own_weights
from ligerprof.analyzers.estimate.placement import Bytes, Placement
from ligerprof.analyzers.estimate.recording import Recording
from ligerprof.analyzers.estimate.tensors import Weight
from ligerprof.errors import UnsupportedError
from ligerprof.recipe.categories import Offload, Precision
from ligerprof.recipe.deepspeed import zero_settings
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Role
from ligerprof.torch_memory.dtypes import FP32_BYTES
from ligerprof.torch_memory.optimizers import moment_count, step_copies

_FP64_BYTES = 8
# cuda_accelerator.py, is_fp16_supported
_OLDEST_WITH_FP16 = (7, 0)


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
        placement = _stage_0 if recipe.precision.is_mixed else _stage_0_in_fp32
        return placement(recipe, elements, weights, first=first)
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
        (
            recipe.precision is Precision.MIXED_FP16 and recipe.gpu_spec.compute_capability < _OLDEST_WITH_FP16,
            f"fp16 on {recipe.gpu_spec.title} with --engine deepspeed",
            "choose --precision fp32",
        ),
    ):
        if given:
            raise UnsupportedError(f"estimate: {what} is not supported yet; {instead}.")


def _stage_0(recipe: TrainingRecipe, elements: Elements, weights: Sequence[Weight], **_first: bool) -> Placement:
    """No ZeRO: an fp32 copy of each tensor, with states created at once (fp16/unfused_optimizer.py).

    The step allocates an fp32 gradient for each copy, after a norm with one for a moment.
    """
    gradients = [FP32_BYTES * weight.elements for weight in weights if weight.trainable]

    def record_update(recording: Recording) -> None:
        recording.touch([max(gradients)], Role.OPTIMIZER_TEMPORARIES)
        recording.touch(gradients * (1 + step_copies(recipe.optimizer)), Role.OPTIMIZER_TEMPORARIES)

    return Placement(
        resident={
            Role.PARAMETERS: weight_width(recipe) * elements.whole,
            Role.OPTIMIZER_STATES: FP32_BYTES * elements.trained + _state_bytes(recipe, elements.trained),
        },
        states={},
        last_reduction={Role.COMMUNICATION: weight_width(recipe) * elements.most_reduced},
        updates=(_stepping(recipe, elements.trained),),
        record_update=record_update,
    )


def _stage_0_in_fp32(
    recipe: TrainingRecipe, elements: Elements, _weights: Sequence[Weight], *, first: bool
) -> Placement:
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
    kept_bytes, largest = sum(weight.size_bytes for weight, _ in own), max((share for _, share in own), default=0)
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
            _normed(largest, kept_bytes),
            *_updates(recipe, (trained,), first=first, kept_bytes=kept_bytes),
        ),
        record_update=None
        if offloaded
        else partial(_record_update, recipe, (trained,), first=first, normed=largest, kept_bytes=kept_bytes),
    )


def _stage_3(recipe: TrainingRecipe, elements: Elements, *, first: bool) -> Placement:
    """Stage 3 partitions the weights as well (stage3.py) and gathers them: `GatheringHooks`."""
    offloaded, trained = recipe.offload is not Offload.NONE, elements.trained_share
    return Placement(
        resident={
            Role.PARAMETERS: 0 if recipe.offload.moves_parameters else weight_width(recipe) * elements.share,
            Role.OPTIMIZER_STATES: 0 if offloaded else FP32_BYTES * trained,
            # partitioned gradients and the bucket have flat buffers from the start
            Role.GRADIENTS: 0 if offloaded else weight_width(recipe) * trained,
            Role.COMMUNICATION: weight_width(recipe) * zero_settings(recipe)["reduce_bucket_size"],
        },
        states={Role.OPTIMIZER_STATES: 0 if offloaded else _state_bytes(recipe, trained)},
        updates=()
        if offloaded
        else (_normed(part(recipe, elements.largest)), *_updates(recipe, elements.groups, first=first)),
        record_update=None
        if offloaded
        else partial(
            _record_update, recipe, elements.groups, first=first, normed=part(recipe, elements.largest), kept_bytes=0
        ),
    )


def initialize_zero(
    recipe: TrainingRecipe, weights: Sequence[Weight], placement: Placement, recording: Recording
) -> None:
    """What `deepspeed.initialize` allocates and frees after the model was built, up to the blocks of `placement`.

    Args:
        recording: of the build, whose kept blocks are the weights in order.
    """
    elements, whole = count_elements(recipe, weights), sorted(recording.kept)
    if recipe.zero == 3:
        _initialize_stage_3(recipe, elements, list(zip(whole, weights, strict=True)), recording)
    elif recipe.zero:
        trained = [number for number, weight in zip(whole, weights, strict=True) if weight.trainable]
        _initialize_stage_1_or_2(recipe, elements, trained, placement, recording)
    elif recipe.precision.is_mixed:
        _initialize_stage_0(recipe, [weight.elements for weight in weights if weight.trainable], recording)


def _initialize_stage_0(recipe: TrainingRecipe, trained: Sequence[int], recording: Recording) -> None:
    """FP16_UnfusedOptimizer: copies of each tensor, and a step with gradients of zeros, which creates the states."""
    width, roles = weight_width(recipe), (Role.OPTIMIZER_STATES, Role.GRADIENTS)
    for elements in trained:
        _copy_in_fp32(recording, elements, through=width)
    gradients = [recording.allocate(size * elements, roles[1]) for size in (width, FP32_BYTES) for elements in trained]
    for elements in trained:
        recording.keep([FP32_BYTES * elements] * moment_count(recipe.optimizer), roles[0])
    for number in gradients:
        recording.free(number)


def _initialize_stage_1_or_2(
    recipe: TrainingRecipe, elements: Elements, trained: Sequence[int], placement: Placement, recording: Recording
) -> None:
    """Weights move to one flat tensor; the fp32 copy of the share comes from a clone; the states' first gradient.

    Where the GPU lacks room for both, they move through main memory (stage_1_and_2.py, flatten_on_accelerator).
    """
    width, share = weight_width(recipe), elements.trained_share
    free_bytes = recipe.gpu_spec.usable_bytes - sum(recording.sizes[number] for number in recording.kept)
    through_host = free_bytes < width * elements.trained
    for number in trained if through_host else ():
        recording.release(number)
    recording.empty_cache()
    recording.keep([width * elements.trained], Role.PARAMETERS)
    for number in trained if not through_host else ():
        recording.release(number)
    if recipe.offload is not Offload.NONE:
        recording.touch([width * share], Role.OPTIMIZER_STATES)
        recording.keep([placement.resident[Role.COMMUNICATION]], Role.COMMUNICATION)
        return
    _copy_in_fp32(recording, share, through=0 if width == FP32_BYTES else width)
    recording.touch([FP32_BYTES * share], Role.GRADIENTS)


def _initialize_stage_3(
    recipe: TrainingRecipe, elements: Elements, weights: Sequence[tuple[int, Weight]], recording: Recording
) -> None:
    """Each weight is replaced by its share; shares move to one flat tensor through main memory (defragment)."""
    width, shares = weight_width(recipe), list[int]()
    for number, weight in weights:
        if not recipe.offload.moves_parameters:
            shares.append(recording.allocate(width * part(recipe, weight.elements), Role.PARAMETERS))
        recording.release(number)
    for number in shares:
        recording.free(number)
    if shares:
        recording.empty_cache()
        recording.keep([width * elements.share], Role.PARAMETERS)
    if recipe.offload is Offload.NONE:
        for group in elements.groups:
            _copy_in_fp32(recording, group, through=FP32_BYTES)
        recording.touch([FP32_BYTES * max(elements.groups)], Role.GRADIENTS)
    recording.keep([width * zero_settings(recipe)["reduce_bucket_size"]], Role.COMMUNICATION)
    if recipe.offload is Offload.NONE:
        recording.keep([width * elements.trained_share], Role.GRADIENTS)


def _copy_in_fp32(recording: Recording, elements: int, *, through: int) -> None:
    """A copy that is made of another one, which has so many bytes per element."""
    other = recording.allocate(through * elements, Role.OPTIMIZER_STATES)
    recording.keep([FP32_BYTES * elements], Role.OPTIMIZER_STATES)
    recording.free(other)


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


def _record_update(
    recipe: TrainingRecipe,
    groups: Iterable[int],
    recording: Recording,
    *,
    first: bool,
    normed: int,
    kept_bytes: int,
) -> None:
    """The blocks of `_normed` and `_updates` in order."""
    role, moments = Role.OPTIMIZER_TEMPORARIES, moment_count(recipe.optimizer) if first else 0
    held = [recording.allocate(kept_bytes, Role.GRADIENTS)] if kept_bytes else []
    recording.touch([_FP64_BYTES * normed], role)
    for elements in groups:
        flat = [recording.allocate(weight_width(recipe) * elements, role)] if recipe.precision.is_mixed else []
        gradient = recording.allocate(FP32_BYTES * elements, role)
        for number in (*flat, *held):
            recording.free(number)
        held = []
        recording.keep([FP32_BYTES * elements] * moments, Role.OPTIMIZER_STATES)
        recording.touch([FP32_BYTES * elements] * step_copies(recipe.optimizer), role)
        recording.free(gradient)


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
