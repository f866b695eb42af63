"""Judge whether an estimated step fits a limit: by allocated bytes, and by expected reserved bytes."""

import dataclasses

from ligerprof.analyzers.estimate.result import FitVerdict, HostVerdict, MemoryEstimate
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.recipe.usable_memory import usable_memory
from ligerprof.torch_memory.allocator.settings import parse_allocator_settings

# The smallest limit at which a step runs, over its allocated peak. Without expandable segments: the median of 22
# recipes (benchmarks/results/borders-h200.jsonl), from 1.00 to 1.43; fragmentation differs that much.
# With them: a simulated step of 3.3 GiB; steps of less than 0.4 GiB needed 1.10 and more, because of whole pages.
_FRAGMENTED_SHARE, _EXPANDABLE_SHARE = 1.14, 1.05


def expected_reserved_bytes(recipe: TrainingRecipe, allocated_bytes: int, streams_bytes: int) -> int:
    """Bytes that the allocator is expected to need for a step with this allocated peak.

    Args:
        streams_bytes: the highest bytes of each CUDA stream, added up: a stream's free blocks serve no other one.
    """
    expandable = parse_allocator_settings(recipe.alloc_conf).rules.expandable_segments
    needed_bytes = int(allocated_bytes * (_EXPANDABLE_SHARE if expandable else _FRAGMENTED_SHARE))
    return needed_bytes + max(0, streams_bytes - allocated_bytes)


def judged(recipe: TrainingRecipe, estimated: MemoryEstimate, *, by_gpu: bool = False) -> MemoryEstimate:
    """The estimate with its verdict on the recipe's memory limit, the GPU's memory, or the lower of both.

    It also judges main memory, if that has a limit.

    Args:
        by_gpu: whether the user chose the GPU; otherwise its memory is not a limit.

    Returns:
        the estimate itself without a limit, and for a compiled step, whose peak it does not know.
    """
    if recipe.compile:
        return estimated
    estimated = dataclasses.replace(estimated, host=_host_verdict(recipe, estimated))
    usable, given_bytes = usable_memory(recipe), recipe.memory_limit_bytes
    if by_gpu and (given_bytes is None or usable.size_bytes < given_bytes):
        limit_bytes, source = usable.size_bytes, usable.source
    elif given_bytes is not None:
        limit_bytes, source = given_bytes, "--memory-limit"
    else:
        return estimated
    moment, allocated_bytes = estimated.highest
    verdict = FitVerdict(
        limit_bytes=limit_bytes,
        limit_source=source,
        decided_by=moment,
        allocated_bytes=allocated_bytes,
        expected_reserved_bytes=expected_reserved_bytes(recipe, allocated_bytes, estimated.streams_bytes),
    )
    return dataclasses.replace(estimated, verdict=verdict)


def _host_verdict(recipe: TrainingRecipe, estimated: MemoryEstimate) -> HostVerdict | None:
    limit_bytes = recipe.host_memory_bytes
    if limit_bytes is None:
        return None
    return HostVerdict(limit_bytes=limit_bytes, needed_bytes=estimated.host_bytes * recipe.gpus)
