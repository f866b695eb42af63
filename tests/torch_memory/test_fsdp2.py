"""Shards and buffers of FSDP2 against torch's own division of tensors."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty, _get_dim0_padded_size

from ligerprof.torch_memory.distributed import WORST_RANK, GroupSizes, ShardedParameter

SHAPES = st.tuples(st.integers(1, 40)) | st.tuples(st.integers(1, 40), st.integers(1, 5))


@given(shape=SHAPES, shards=st.integers(1, 70))
@settings(max_examples=100, deadline=None)
def test_shards_are_torch_s_chunks(shape: tuple[int, ...], shards: int) -> None:
    chunks = _chunk_with_empty(torch.empty(shape, device="meta"), shards, dim=0)
    parameter = ShardedParameter(shape=shape, shards=shards, stored_bytes=4, gathered_bytes=2)
    elements = [torch.Size(parameter.shard_shape(rank)).numel() for rank in range(shards)]
    assert elements == [chunk.numel() for chunk in chunks]
    assert max(elements) == elements[WORST_RANK] == parameter.padded_elements
    padded = _get_dim0_padded_size(torch.Size(shape), shards)
    assert parameter.copy_out_bytes == 2 * padded.numel()


def test_buffers_of_a_group() -> None:
    trained = ShardedParameter(shape=(10, 4), shards=4, stored_bytes=4, gathered_bytes=2)
    frozen = ShardedParameter(shape=(8,), shards=4, stored_bytes=4, gathered_bytes=2, trainable=False)
    sizes = GroupSizes(parameters=(trained, frozen), reduce_bytes=4)
    # three rows of ten on each rank, two more of the frozen one
    assert sizes.cast_bytes == 2 * (12 + 2)
    assert sizes.gather_bytes == 4 * sizes.cast_bytes
    assert sizes.reduce_input_bytes == 4 * 4 * 12
    assert sizes.reduce_output_bytes == sizes.gradient_bytes == 4 * 12
    whole = ShardedParameter(shape=(10, 4), shards=4, stored_bytes=4, gathered_bytes=4)
    assert GroupSizes(parameters=(whole,), reduce_bytes=4).cast_bytes == 0
