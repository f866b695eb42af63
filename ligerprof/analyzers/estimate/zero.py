"""What stays on one GPU of N under DeepSpeed's ZeRO, and what moves to main memory, in DeepSpeed's defaults."""

from collections.abc import Iterable

from ligerprof.analyzers.estimate.context import FP32_BYTES
from ligerprof.analyzers.estimate.placement import Bytes, Placement, moment_count
from ligerprof.analyzers.estimate.tape import Weight
from ligerprof.deepspeed_config import zero_settings
from ligerprof.errors import NotBuiltError
from ligerprof.recipe import TrainingRecipe
from ligerprof.roles import Role

_HALF_BYTES = 2


def zero_placement(recipe: TrainingRecipe, weights: Iterable[Weight]) -> Placement:
    """The share of one GPU under the recipe's ZeRO stage.

    Raises:
        NotBuiltError: stage 0, offload to NVMe, or adapters.
    """
    _require_known(recipe)
    sizes = [weight.elements for weight in weights]
    elements, largest = sum(sizes), max(sizes)
    share = -(-elements // recipe.gpus)
    if recipe.zero == 3:
        return _stage_3(recipe, elements, share, largest)
    return _stage_1_or_2(recipe, elements, share, largest)


def _require_known(recipe: TrainingRecipe) -> None:
    for given, what, instead in (
        (recipe.zero == 0, "--engine deepspeed with --zero 0", "use --zero 1, 2 or 3"),
        (recipe.offload == "nvme", "--offload nvme", "use --offload all"),
        (recipe.lora is not None, "--lora with --engine deepspeed", "use --engine torch"),
        (zero_settings(recipe)["overlap_comm"], "overlap_comm", "switch it off"),
        (not zero_settings(recipe)["contiguous_gradients"], "contiguous_gradients off", "switch it on"),
    ):
        if given:
            raise NotBuiltError(f"estimate: {what} has no closed form yet; {instead}.")


def _stage_1_or_2(recipe: TrainingRecipe, elements: int, share: int, largest: int) -> Placement:
    """Stage 1 partitions the fp32 copy and the moments, stage 2 the gradients too (stage_1_and_2.py)."""
    offloaded = recipe.offload != "none"
    kept_share = 1 / recipe.gpus if recipe.zero == 2 else 1.0
    resident = {
        Role.PARAMETERS: _HALF_BYTES * elements,
        Role.OPTIMIZER_STATES: 0 if offloaded else FP32_BYTES * share,
        # temp_grad_buffer_for_gpu_offload: gradients pass through it on their way to main memory
        Role.COMMUNICATION: _HALF_BYTES * largest if offloaded else 0,
    }
    return Placement(
        resident=resident,
        states={Role.OPTIMIZER_STATES: 0 if offloaded else _moment_bytes(recipe, share)},
        # the bucket that gradients are gathered in, made with the first of them
        reduction={Role.COMMUNICATION: _bucket_bytes(recipe)},
        gradient_share=0.0 if offloaded else kept_share,
        gradients_at_update=0 if offloaded else _HALF_BYTES * share,
        update={} if offloaded else _update_bytes(recipe, share),
        host_bytes=_host_bytes(recipe, share),
    )


def _stage_3(recipe: TrainingRecipe, elements: int, share: int, largest: int) -> Placement:
    """Stage 3 partitions the weights as well and gathers them when they are needed (stage3.py).

    From the second step on the order of modules is known, and prefetching runs ahead until
    max_live_parameters are there (partitioned_param_coordinator.py, fetch_sub_module). The first
    step's backward holds one layer's weights and the head's.
    """
    offloaded, moved = recipe.offload != "none", recipe.offload == "all"
    settings = zero_settings(recipe)
    most_live, sub_group = settings["stage3_max_live_parameters"], settings["sub_group_size"]
    return Placement(
        resident={
            Role.PARAMETERS: 0 if moved else _HALF_BYTES * share,
            Role.OPTIMIZER_STATES: 0 if offloaded else FP32_BYTES * share,
            # partitioned gradients have one flat buffer from the start, and so has the bucket
            Role.GRADIENTS: 0 if offloaded else _HALF_BYTES * share,
            Role.COMMUNICATION: _bucket_bytes(recipe),
        },
        states={Role.OPTIMIZER_STATES: 0 if offloaded else _moment_bytes(recipe, share)},
        # a weight that is needed is gathered whatever the limit says
        running={Role.COMMUNICATION: _HALF_BYTES * min(elements, max(most_live, largest))},
        first_backward={Role.COMMUNICATION: _HALF_BYTES * (largest + _layer_elements(recipe))},
        gradient_share=0.0,
        gradients_at_update=0 if offloaded else _HALF_BYTES * share,
        update={} if offloaded else _update_bytes(recipe, min(share, sub_group)),
        host_bytes=_host_bytes(recipe, share),
    )


def _bucket_bytes(recipe: TrainingRecipe) -> int:
    bucket_bytes: int = _HALF_BYTES * zero_settings(recipe)["reduce_bucket_size"]
    return bucket_bytes


def _layer_elements(recipe: TrainingRecipe) -> int:
    """Parameters of the first decoder layer."""
    return sum(item.elements for item in recipe.spec.parameters if ".layers.0." in item.name or ".h.0." in item.name)


def _moment_bytes(recipe: TrainingRecipe, share: int) -> int:
    return moment_count(recipe) * FP32_BYTES * share


def _update_bytes(recipe: TrainingRecipe, elements: int) -> Bytes:
    """The step flattens the gradients and casts them to fp32; foreach AdamW takes square roots besides."""
    square_roots = FP32_BYTES if recipe.optimizer == "adamw-foreach" else 0
    return {Role.OPTIMIZER_TEMPORARIES: (_HALF_BYTES + FP32_BYTES + square_roots) * elements}


def _host_bytes(recipe: TrainingRecipe, share: int) -> int:
    """Main memory: the fp32 copy, its gradient and two moments; with everything offloaded the 16-bit weights too."""
    if recipe.offload == "none":
        return 0
    optimizer_bytes = (2 + moment_count(recipe)) * FP32_BYTES * share
    return optimizer_bytes + (_HALF_BYTES * share if recipe.offload == "all" else 0)


def zero_copies(recipe: TrainingRecipe) -> tuple[tuple[int, bool], ...]:
    """(bytes a parameter, whether this GPU holds them for all parameters) of weights, optimizer states, gradients."""
    on_gpu = recipe.offload == "none"
    return (
        (0 if recipe.offload == "all" else _HALF_BYTES, recipe.zero < 3),
        (FP32_BYTES * (1 + moment_count(recipe)) if on_gpu else 0, False),
        (_HALF_BYTES if on_gpu else 0, recipe.zero < 2),
    )
