import numpy as np
import pytest

from ligerprof.analyzers.explain.groups import list_lives
from ligerprof.snapshots.reader import Snapshot
from ligerprof.snapshots.replay import replay
from tests.torch_memory.allocator.programs import random_program


@pytest.mark.parametrize("seed", range(4))
def test_every_block_of_the_least_size_is_listed_and_all_of_the_marked_moments(seed: int) -> None:
    replayed = replay(Snapshot.from_dict(random_program(seed).snapshot()), 0)
    moment = replayed.peak_moment()

    listed = list_lives(replayed, [moment], most=20)

    chosen = set(listed.blocks.tolist())
    large = set(np.flatnonzero(replayed.requested_bytes >= listed.least_bytes).tolist())
    live = set(replayed.live_at(moment).tolist())
    assert chosen == large | live
    assert len(large) <= 20
