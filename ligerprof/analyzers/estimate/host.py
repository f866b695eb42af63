"""Main memory of one rank's process: what DeepSpeed 0.19.8 or FSDP2 offload, buffer by buffer; loading and saving.

Not included: Python, libraries and the kernels that they load, the CUDA context.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ligerprof.analyzers.estimate.groups import flat_sizes, sharded_parameter
from ligerprof.analyzers.estimate.partition import Elements, count_elements, part, weight_width
from ligerprof.analyzers.estimate.partitioned import outer_ranks, own_weights
from ligerprof.analyzers.estimate.placement import state_sizes, stored_sizes, trained_tensors
from ligerprof.analyzers.estimate.result import MainMemory
from ligerprof.analyzers.estimate.tensors import Weight
from ligerprof.recipe.categories import Engine, Offload
from ligerprof.recipe.deepspeed import Config, zero_settings
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.torch_memory.dtypes import FP32_BYTES, HALF_BYTES, highest_moment
from ligerprof.torch_memory.optimizers import OPTIMIZERS, moment_count
from ligerprof.torch_memory.saved_tensors import pinned_bytes

# deepspeed/runtime/zero/offload_config.py: max_in_cpu of parameters, buffer_count of the optimizer
_MOST_IN_MEMORY = 1_000_000_000
_OPTIMIZER_BUFFERS = 4
# transformers 5, save_pretrained: max_shard_size
_FILE_BYTES = 50_000_000_000
# adapters are made in memory; weights of another dtype than the file's are twice as large
_CAST_SHARE = 0.5


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


def main_memory(recipe: TrainingRecipe, weights: Collection[Weight], training_bytes: int) -> MainMemory:
    """Main memory while transformers 5 loads a checkpoint of 16-bit weights on the CPU, and while it saves the model.

    Loading: safetensors maps the files, and weights of their dtype stay mapped until they move to the GPU; others are
    copies. Under FSDP and accelerate's launcher only the first rank reads them; ZeRO-3 copies the mapped tensors into
    its partitions; quantized weights are read one by one.

    Saving: safetensors copies what is on the GPU, a whole file at once, and 50 GB are one file; it writes what is in
    main memory as it is. FSDP and ZeRO-3 gather the model in rank 0's main memory first. torch.save, of optimizers,
    copies one tensor at a time.
    """
    file_bytes = HALF_BYTES * sum(weight.elements for weight in weights if not weight.is_adapter)
    if recipe.engine is Engine.FSDP1:
        stored = [sizes.whole_bytes for sizes in flat_sizes(recipe, weights)]
    elif recipe.engine is Engine.FSDP2:
        sharded = [sharded_parameter(recipe, weight) for weight in weights]
        stored = [each.storage_bytes * each.shards for each in sharded]
    else:
        stored = [weight.size_bytes for weight in weights]
    whole_bytes = sum(stored)
    gathers = recipe.engine.is_fsdp or recipe.zero == 3
    is_copied = whole_bytes > file_bytes * (1 + _CAST_SHARE) and not recipe.packed_bits and recipe.zero < 3
    if gathers:
        saved_bytes = whole_bytes if recipe.save_whole else 0
    else:
        has_adapters = any(weight.is_adapter for weight in weights)
        own = [weight.size_bytes for weight in weights if weight.trainable or not has_adapters]
        saved_bytes = min(sum(own), _FILE_BYTES)
    return MainMemory(
        loading_bytes=whole_bytes if is_copied else 0,
        loading_ranks=1 if recipe.engine.is_fsdp else recipe.gpus,
        file_bytes=file_bytes,
        training_bytes=training_bytes,
        saving_bytes=training_bytes + saved_bytes,
    )


def _shards(recipe: TrainingRecipe, weights: Collection[Weight]) -> Iterator[_Buffer]:
    """FSDP2's CPUOffloadPolicy with page-locked memory, as on GPUs: shards, gradients, what the optimizer makes.

    The copy of a gradient to main memory page-locks its target (foreach_reduce in _fsdp_collectives.py).
    """
    for size_bytes in stored_sizes(recipe, weights):
        yield _Buffer(size_bytes, locked=True)
    for tensor in trained_tensors(recipe, weights):
        yield _Buffer(tensor.size_bytes, locked=True)
    update = OPTIMIZERS[recipe.optimizer].update(trained_tensors(recipe, weights), recipe.gpu_spec)
    for size_bytes in (*state_sizes(recipe, weights), *highest_moment(update)):
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
