"""The buckets in which DistributedDataParallel reduces gradients.

Read in torch 2.13: torch/nn/parallel/distributed.py and torch/csrc/distributed/c10d/reducer.cpp.

- The constructor puts all gradients into one bucket (`compute_bucket_size_limits`), unless it looks for unused
  parameters. A static graph adds a map of one int32 per parameter, and nothing else.
- The second forward pass builds buckets anew in the order in which gradients have arrived (`_rebuild_buckets` in
  `_pre_forward`).
- NCCL's process group keeps the tensors of a reduction that nobody has waited for until the next reduction
  (ProcessGroupNCCL.cpp, `shelvesToUnstash_`). DDP waits for a future instead, so the first bucket lives on next to the
  new ones, up to the first reduction of the second backward pass.
- Gradients are copied to their buckets and back, or, with `gradient_as_bucket_view`, the copy replaces the gradient.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence

from ligerprof.torch_memory.scratch import Scratch
from ligerprof.units import MIB

# reducer.hpp, kDefaultFirstBucketBytes and kDefaultBucketBytesCap
FIRST_BUCKET_BYTES = MIB
BUCKET_BYTES = 25 * MIB
# distributed.py, broadcast_bucket_size
BROADCAST_BYTES = 250 * MIB


def built_buckets(gradients: Iterable[int]) -> tuple[int, ...]:
    """Bytes of the buckets that the constructor allocates.

    Args:
        gradients: bytes of each gradient; all of one dtype.
    """
    return (sum(gradients),)


def rebuilt_buckets(gradients: Sequence[int]) -> tuple[int, ...]:
    """Bytes of the buckets from the second step on.

    Args:
        gradients: bytes of each gradient in the order of their arrival.
    """
    return tuple(sum(gradients[index] for index in bucket) for bucket in bucket_assignment(gradients))


def broadcast_scratch(parameters: Iterable[tuple[Hashable, int]]) -> Scratch:
    """The flat copies in which the constructor broadcasts the model, two at a time; a tensor alone is not copied.

    torch/csrc/distributed/c10d/comm.cpp, broadcast_coalesced.

    Args:
        parameters: dtype and bytes of each.
    """
    of_dtype: dict[Hashable, list[tuple[int, int]]] = {}
    for number, (dtype, size_bytes) in enumerate(parameters):
        of_dtype.setdefault(dtype, []).append((number, size_bytes))
    buckets = sorted(
        [numbered[index] for index in bucket]
        for numbered in of_dtype.values()
        for bucket in bucket_assignment([size for _, size in numbered], BROADCAST_BYTES, BROADCAST_BYTES)
    )
    made = [sum(size for _, size in bucket) if len(bucket) > 1 else 0 for bucket in buckets]
    # each is freed before the second one after it comes
    events = (size for last, new in zip([0, 0, *made], [*made, 0, 0], strict=True) for size in (-last, new))
    return tuple(size for size in events if size)


def bucket_assignment(
    gradients: Sequence[int], limit_bytes: int = FIRST_BUCKET_BYTES, next_limit_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[int, ...]]:
    """Indices of the gradients in each bucket: a bucket is closed by the gradient that reaches its limit.

    reducer.cpp, compute_bucket_assignment_by_size.
    """
    held: list[int] = []
    held_bytes = 0
    for index, size_bytes in enumerate(gradients):
        held.append(index)
        held_bytes += size_bytes
        if held_bytes >= limit_bytes:
            yield tuple(held)
            held, held_bytes, limit_bytes = [], 0, next_limit_bytes
    if held:
        yield tuple(held)
