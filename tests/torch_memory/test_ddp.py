"""DDP's buckets against torch's own assignment."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed

from ligerprof.torch_memory.distributed import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    bucket_assignment,
    built_buckets,
    rebuilt_buckets,
)
from ligerprof.units import MIB


@given(sizes=st.lists(st.integers(1, 40 * MIB // 4), min_size=1, max_size=40))
@settings(max_examples=100, deadline=None)
def test_buckets_are_torch_s(sizes: list[int]) -> None:
    tensors = [torch.empty(elements, device="meta") for elements in sizes]
    buckets, _ = distributed._compute_bucket_assignment_by_size(tensors, [FIRST_BUCKET_BYTES, BUCKET_BYTES])
    gradients = [4 * elements for elements in sizes]
    # torch sorts them by their first tensor; all are of one dtype here, so that this is their order already
    assert [list(bucket) for bucket in bucket_assignment(gradients)] == buckets
    assert sum(rebuilt_buckets(gradients)) == sum(built_buckets(gradients)) == sum(gradients)


def test_a_bucket_is_closed_by_the_gradient_that_reaches_its_limit() -> None:
    gradients = (MIB - 4, 8, 25 * MIB, 24 * MIB, 24 * MIB, 4)
    assert list(bucket_assignment(gradients)) == [(0, 1), (2,), (3, 4), (5,)]
    assert rebuilt_buckets(gradients) == (MIB + 4, 25 * MIB, 48 * MIB, 4)
