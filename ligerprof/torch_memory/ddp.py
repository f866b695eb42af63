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

from collections.abc import Iterable, Iterator, Sequence

from ligerprof.units import MIB

# reducer.hpp, kDefaultFirstBucketBytes and kDefaultBucketBytesCap
FIRST_BUCKET_BYTES = MIB
BUCKET_BYTES = 25 * MIB


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


def bucket_assignment(gradients: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Indices of the gradients in each bucket: a bucket is closed by the gradient that reaches its limit.

    reducer.cpp, compute_bucket_assignment_by_size.
    """
    held: list[int] = []
    held_bytes, limit_bytes = 0, FIRST_BUCKET_BYTES
    for index, size_bytes in enumerate(gradients):
        held.append(index)
        held_bytes += size_bytes
        if held_bytes >= limit_bytes:
            yield tuple(held)
            held, held_bytes, limit_bytes = [], 0, BUCKET_BYTES
    if held:
        yield tuple(held)
