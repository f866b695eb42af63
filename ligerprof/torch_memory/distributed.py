"""What DDP, FSDP and NCCL keep and allocate on one rank: buckets, shards, gathered weights, reductions."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from ligerprof.torch_memory.dtypes import Scratch
from ligerprof.units import MIB

# Two H200 connected by NVLink, NCCL of torch 2.11 (benchmarks/results/ranks-h200x2.jsonl). Connecting the ranks of the
# process group; the channels of its first collective; and a further communicator over some of the ranks, as HSDP has.
_CONNECTION_BYTES = 480_313_344
_CHANNELS_BYTES = 497_025_024
_FURTHER_COMMUNICATOR_BYTES = 408_944_640


def nccl_bytes(ranks: int, *, further_communicators: int = 0) -> int:
    """Bytes on each GPU of a process group whose collectives have run; the number of ranks was not varied."""
    if ranks == 1:
        return 0
    return _CONNECTION_BYTES + _CHANNELS_BYTES + further_communicators * _FURTHER_COMMUNICATOR_BYTES


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


# chunks are filled from the first rank on (`torch.chunk` in FSDPParam._init_sharded_param), so no rank holds more
WORST_RANK = 0


def shard_rows(rows: int, shards: int, rank: int) -> int:
    """Rows of a parameter's first dimension on `rank`; the last ranks may have fewer, or none.

    _fsdp_common.py, _chunk_with_empty.
    """
    most = padded_rows(rows, shards)
    return min(most, max(0, rows - rank * most))


def padded_rows(rows: int, shards: int) -> int:
    """Rows that every rank stores: the first rank's (FSDPParam._init_sharded_param, `padded_sharded_size`)."""
    return -(-rows // shards)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedParameter:
    """A parameter that FSDP2 shards along its first dimension.

    Attributes:
        shape: the shape of the whole parameter.
        shards: the number of ranks that it is sharded over.
        stored_bytes: bytes per element of the shard.
        gathered_bytes: bytes per element of the gathered parameter and of its gradient.
        trainable: whether it has a gradient.
    """

    shape: tuple[int, ...]
    shards: int
    stored_bytes: int
    gathered_bytes: int
    trainable: bool = True

    @property
    def padded_elements(self) -> int:
        """Elements that every rank stores and sends."""
        return padded_rows(self.shape[0], self.shards) * prod(self.shape[1:])

    @property
    def storage_bytes(self) -> int:
        """Bytes of the padded shard on every rank."""
        return self.padded_elements * self.stored_bytes

    @property
    def whole_bytes(self) -> int:
        """Bytes of the whole parameter in the dtype of the shards."""
        return prod(self.shape) * self.stored_bytes

    def shard_shape(self, rank: int = WORST_RANK) -> tuple[int, ...]:
        """The shape of a rank's shard without padding, which the optimizer works on."""
        return (shard_rows(self.shape[0], self.shards, rank), *self.shape[1:])

    @property
    def is_cast(self) -> bool:
        """Whether the mixed-precision policy gathers it in another dtype than that of the shards."""
        return self.gathered_bytes != self.stored_bytes

    @property
    def copy_out_bytes(self) -> int:
        """Bytes of the gathered parameter, with the padding of all ranks (FSDPParam.init_all_gather_outputs)."""
        return self.padded_elements * self.shards * self.gathered_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSizes:
    """The buffers of the parameters that one `fully_shard` call gathers and reduces together.

    Attributes:
        parameters: the parameters, trainable or not.
        reduce_bytes: bytes per element of the reduction.
    """

    parameters: Sequence[ShardedParameter]
    reduce_bytes: int

    @property
    def cast_bytes(self) -> int:
        """The shards cast for the gathering: one buffer, freed when the gathering is issued; 0 without a cast.

        _fsdp_collectives.py, _get_param_all_gather_inputs.
        """
        return sum(item.padded_elements * item.gathered_bytes for item in self.parameters if item.is_cast)

    @property
    def gather_bytes(self) -> int:
        """The all-gather's output, from which each parameter is copied out (foreach_all_gather)."""
        return sum(item.copy_out_bytes for item in self.parameters)

    @property
    def reduce_input_bytes(self) -> int:
        """The reduce-scatter's input: all gradients, padded, in the dtype of the reduction (foreach_reduce)."""
        return sum(item.padded_elements * item.shards for item in self._trained) * self.reduce_bytes

    @property
    def reduce_output_bytes(self) -> int:
        """The reduce-scatter's output: this rank's share of the gradients (foreach_reduce)."""
        return sum(item.padded_elements for item in self._trained) * self.reduce_bytes

    @property
    def gradient_bytes(self) -> int:
        """What stays of it: one buffer in the dtype of the shards, which all gradients of the group are views of."""
        return sum(item.storage_bytes for item in self._trained)

    @property
    def _trained(self) -> list[ShardedParameter]:
        return [item for item in self.parameters if item.trainable]


# _flat_param.py, _get_aligned_numel
_ALIGNMENT_BYTES = 16


class FlatSizes(GroupSizes):
    """The same for the parameters that FSDP1 joins in one tensor, of which each rank holds an equal part.

    _flat_param.py of torch 2.13 with use_orig_params, which aligns each parameter, and fills up to whole parts.
    """

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each parameter starts, in elements, and the end of the last one."""
        end, starts = 0, []
        aligned = _ALIGNMENT_BYTES // self.parameters[0].gathered_bytes
        for item in self.parameters:
            starts.append(-(-end // aligned) * aligned)
            end = starts[-1] + prod(item.shape)
        return (*starts, end)

    @property
    def part_elements(self) -> int:
        """Elements that every rank stores, sends and receives."""
        return -(-self.starts[-1] // self.parameters[0].shards)

    def slices(self, rank: int = WORST_RANK) -> tuple[int, ...]:
        """Elements of each parameter that a rank's part holds, which the optimizer works on."""
        first, last = rank * self.part_elements, (rank + 1) * self.part_elements
        spans = ((start, start + prod(item.shape)) for start, item in zip(self.starts, self.parameters, strict=False))
        return tuple(max(0, min(end, last) - max(start, first)) for start, end in spans)

    @property
    def cast_bytes(self) -> int:
        """The part in the dtype of the gathering (FlatParamHandle._use_low_precision_shard); 0 without a cast."""
        first = self.parameters[0]
        return self.part_elements * first.gathered_bytes if first.is_cast else 0

    @property
    def gather_bytes(self) -> int:
        """The gathered tensor, which all parameters are views of, and the gradient of that size."""
        return self._whole_elements * self.parameters[0].gathered_bytes

    @property
    def reduce_input_bytes(self) -> int:
        """The gradient in the dtype of the reduction."""
        return self._whole_elements * self.reduce_bytes

    @property
    def reduce_output_bytes(self) -> int:
        """The rank's part of it."""
        return self.part_elements * self.reduce_bytes

    @property
    def gradient_bytes(self) -> int:
        """The rank's part in the dtype of the shards."""
        return self.part_elements * self.parameters[0].stored_bytes

    @property
    def whole_bytes(self) -> int:
        """The gathered tensor in the dtype of the shards."""
        return self._whole_elements * self.parameters[0].stored_bytes

    @property
    def _whole_elements(self) -> int:
        return self.part_elements * self.parameters[0].shards
