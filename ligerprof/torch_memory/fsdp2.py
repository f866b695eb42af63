"""What FSDP2 keeps and allocates on one rank: shards, gathered weights, reductions.

Read in torch 2.13, torch/distributed/fsdp/_fully_shard; these parts are the same in 2.11.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

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
