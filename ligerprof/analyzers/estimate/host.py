"""Main memory that DeepSpeed 0.19.8 or FSDP2 allocates in one rank's process with offload, buffer by buffer.

Not included: Python, libraries and the kernels that they load, the CUDA context.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ligerprof.analyzers.estimate.partition import Elements, count_elements, part, weight_width
from ligerprof.analyzers.estimate.partitioned import outer_ranks, own_weights
from ligerprof.analyzers.estimate.placement import state_sizes, stored_sizes, trained_tensors
from ligerprof.analyzers.estimate.tensors import Weight
from ligerprof.recipe.categories import Engine, Offload
from ligerprof.recipe.deepspeed import Config, zero_settings
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.torch_memory.dtypes import FP32_BYTES
from ligerprof.torch_memory.optimizers import OPTIMIZERS, moment_count
from ligerprof.torch_memory.saved_tensors import pinned_bytes

# deepspeed/runtime/zero/offload_config.py: max_in_cpu of parameters, buffer_count of the optimizer
_MOST_IN_MEMORY = 1_000_000_000
_OPTIMIZER_BUFFERS = 4


@dataclass(frozen=True, slots=True)
class _Buffer:
    """One buffer in main memory.

    Attributes:
        size_bytes: the requested size.
        locked: whether torch page-locks the buffer.
    """

    size_bytes: int
    locked: bool = False

    @property
    def held_bytes(self) -> int:
        """Bytes of main memory."""
        return pinned_bytes(self.size_bytes) if self.locked else self.size_bytes


def host_bytes(recipe: TrainingRecipe, weights: Collection[Weight]) -> int:
    """Main memory of one rank's process for training, from the first optimizer step on; 0 without offload."""
    if recipe.offload is Offload.NONE:
        return 0
    if recipe.engine is Engine.FSDP2:
        return sum(block.held_bytes for block in _shards(recipe, weights))
    elements, settings = count_elements(recipe, weights), zero_settings(recipe)
    if recipe.zero < 3:
        blocks = _stage_1_or_2(recipe, elements, settings, weights)
    elif recipe.offload is Offload.NVME:
        blocks = _stage_3_on_disk(recipe, elements, settings)
    else:
        blocks = _stage_3(recipe, elements, settings, weights)
    return sum(block.held_bytes for block in blocks)


def _shards(recipe: TrainingRecipe, weights: Collection[Weight]) -> Iterator[_Buffer]:
    """FSDP2's CPUOffloadPolicy with page-locked memory, as on GPUs: shards, gradients, what the optimizer makes.

    The copy of a gradient to main memory page-locks its target (foreach_reduce in _fsdp_collectives.py).
    """
    for size_bytes in stored_sizes(recipe, weights):
        yield _Buffer(size_bytes, locked=True)
    for tensor in trained_tensors(recipe, weights):
        yield _Buffer(tensor.size_bytes, locked=True)
    update = OPTIMIZERS[recipe.optimizer].update(trained_tensors(recipe, weights), recipe.gpu_spec)
    for size_bytes in (*state_sizes(recipe, weights), *update):
        yield _Buffer(size_bytes)


def _stage_1_or_2(
    recipe: TrainingRecipe, elements: Elements, settings: Config, weights: Collection[Weight]
) -> Iterator[_Buffer]:
    """stage_1_and_2.py."""
    locked, trained = settings["offload_optimizer"]["pin_memory"], elements.trained_share
    # single_partition_of_fp32_groups and its gradient (initialize_optimizer_states)
    yield from (_Buffer(FP32_BYTES * trained, locked),) * 2
    yield from _moments(recipe, trained)
    # param_buffer_of_bit16_for_cpu_offload_groups: updated weights on their way to the GPU
    yield _Buffer(weight_width(recipe) * trained, locked)
    # temp_grad_buffer_for_cpu_offload
    yield _Buffer(weight_width(recipe) * elements.largest, locked)
    if recipe.zero == 2 and recipe.grad_accum > 1:
        # accumulated_grads_in_cpu, of each parameter with a part on this rank (async_accumulate_grad_in_cpu_via_gpu);
        # stage 1 reduces once per step, and its micro_step_id stays 0
        of_ranks = (
            own_weights(recipe, [item for item in weights if item.trainable], rank) for rank in outer_ranks(recipe)
        )
        for weight, _ in max(of_ranks, key=lambda own: sum(item.elements for item, _ in own)):
            yield _Buffer(weight_width(recipe) * weight.elements, locked)


def _stage_3(
    recipe: TrainingRecipe, elements: Elements, settings: Config, weights: Collection[Weight]
) -> Iterator[_Buffer]:
    """stage3.py, with the optimizer or everything in main memory."""
    locked = settings["offload_optimizer"]["pin_memory"]
    for group in elements.groups:
        # fp32_partitioned_groups_flat and its gradient (initialize_optimizer_states)
        yield _Buffer(FP32_BYTES * group)
        yield _Buffer(FP32_BYTES * group, locked)
        yield from _moments(recipe, group)
    # grad_partitions_flat_buffer
    yield _Buffer(weight_width(recipe) * elements.trained_share, locked)
    if recipe.offload is Offload.ALL:
        # param_groups_fp16_flat_cpu_memory
        yield _Buffer(weight_width(recipe) * elements.trained_share, locked=True)
        yield from _partitions(recipe, settings["offload_param"]["pin_memory"], weights)


def _partitions(recipe: TrainingRecipe, locked: bool, weights: Collection[Weight]) -> Iterator[_Buffer]:
    """Each parameter's own partition (partition_parameters.py, _partition_param).

    A trainable parameter moves to the flat buffer; torch caches the page-locked memory that this frees.
    """
    for weight in weights:
        if locked or not weight.trainable:
            yield _Buffer(weight_width(recipe) * part(recipe, weight.elements), locked)


def _stage_3_on_disk(recipe: TrainingRecipe, elements: Elements, settings: Config) -> Iterator[_Buffer]:
    """Main memory with NVMe offload; DeepSpeed page-locks its I/O buffers itself, without rounding."""
    optimizer, weights = settings["offload_optimizer"], settings["offload_param"]
    yield _Buffer(weight_width(recipe) * elements.trained_share, optimizer["pin_memory"])
    # param_groups_fp16_flat_cpu_memory
    most = weights.get("max_in_cpu", _MOST_IN_MEMORY)
    yield _Buffer(weight_width(recipe) * min(elements.trained_share, most), locked=True)
    if elements.trained_share > most:
        # reserve_partitioned_swap_space
        yield _Buffer(weight_width(recipe) * recipe.gpus * max(elements.groups))
    # swap_tensor/partitioned_param_swapper.py
    yield _Buffer(weight_width(recipe) * weights["buffer_count"] * weights["buffer_size"])
    # swap_tensor/utils.py, SwapBufferManager
    yield _Buffer(FP32_BYTES * optimizer.get("buffer_count", _OPTIMIZER_BUFFERS) * max(elements.groups))


def _moments(recipe: TrainingRecipe, elements: int) -> Iterator[_Buffer]:
    """DeepSpeedCPUAdam's exp_avg and exp_avg_sq, created in its first step (ops/adam/cpu_adam.py)."""
    yield from (_Buffer(FP32_BYTES * elements),) * moment_count(recipe.optimizer)
