import numpy as np
import pytest

from ligerprof.analyzers.explain import lives
from ligerprof.analyzers.explain.lives import list_lives
from ligerprof.snapshots.reader import Snapshot, read_snapshot
from ligerprof.snapshots.replay import replay
from tests.paths import RECORDINGS
from tests.torch_memory.allocator.programs import random_program


@pytest.mark.parametrize("seed", range(4))
def test_every_block_of_the_least_size_is_listed_and_all_of_the_marked_moments(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lives, "_MOST_LISTED", 20)
    replayed = replay(Snapshot.from_dict(random_program(seed).snapshot()), 0)
    moment = replayed.peak_moment()

    listed = list_lives(replayed, [moment])

    chosen = set(listed.blocks.tolist())
    large = set(np.flatnonzero(replayed.requested_bytes >= listed.least_bytes).tolist())
    live = set(replayed.live_at(moment).tolist())
    assert chosen == large | live
    assert len(large) <= 20


@pytest.mark.parametrize("name", ["small-late", "hf-ckpt-4x1024"])
def test_addresses_are_those_of_the_file(name: str) -> None:
    snapshot = read_snapshot(RECORDINGS / f"{name}.pickle.xz")
    replayed = replay(snapshot, 0)

    listed = list_lives(replayed, [replayed.last_moment])

    at_end = {
        address
        for address, freed in zip(listed.addresses.tolist(), replayed.freed_by[listed.blocks].tolist(), strict=True)
        if freed < 0
    }
    in_file = set()
    for segment in snapshot.segments_of(0):
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                in_file.add(address)
            address += block["size"]
    assert at_end == in_file
