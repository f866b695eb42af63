import random
from typing import Any

import pytest

from ligerprof.snapshots.reader import Snapshot, read_snapshot
from ligerprof.snapshots.replay import Replay, replay
from ligerprof.snapshots.segments import Segment, segments_at
from tests.paths import RECORDINGS
from tests.torch_memory.allocator.programs import SlowAllocator, random_program


def described(segments: tuple[Segment, ...], replayed: Replay) -> list[Any]:
    return [
        (
            segment.address,
            segment.size_bytes,
            segment.stream,
            segment.small,
            sorted(zip(*(replayed.addresses_of(list(segment.blocks)).tolist(),), strict=True)),
            [tuple(piece) for piece in segment.waiting],
            [tuple(piece) for piece in segment.free],
        )
        for segment in segments
    ]


def truth(program: SlowAllocator) -> list[Any]:
    runs = [
        (run["address"], run["total_size"], run["stream"], run["segment_type"] == "small", run["blocks"])
        for run in program.snapshot()["segments"]
    ]
    return sorted(
        [
            address,
            size,
            stream,
            small,
            [(block["address"],) for block in blocks if block["state"] == "active_allocated"],
            [(block["address"], block["size"]) for block in blocks if block["state"] == "active_pending_free"],
            [(block["address"], block["size"]) for block in blocks if block["state"] == "inactive"],
        ]
        for address, size, stream, small, blocks in runs
    )


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_segments_of_the_past_are_those_of_the_allocator_then(seed: int, expandable: bool) -> None:
    whole = random_program(seed, expandable=expandable, events=160)
    drop = random.Random(seed).choice([0, 30])
    if drop:
        # the size of an older block that is freed within the recording is known only in the small pool
        whole = random_program(seed, expandable=expandable, events=160, small_only=True)
    replayed = replay(Snapshot.from_dict(whole.snapshot(drop=drop)), 0)
    for events in range(40, 160, 13):
        # the same draws, so that this is an earlier moment of the same program
        program = random_program(seed, expandable=expandable, events=events, small_only=drop > 0)
        moment = len(program.events) - drop

        found = segments_at(replayed, moment)

        assert [list(each) for each in described(found, replayed)] == truth(program), moment
        assert sum(segment.size_bytes for segment in found) == replayed.reserved_bytes[moment]


@pytest.mark.parametrize("name", ["small-graphs", "small-streams", "small-expandable", "small-ring-3000-expandable"])
def test_pieces_of_recordings_add_up_to_the_reserved_bytes(name: str) -> None:
    replayed = replay(read_snapshot(RECORDINGS / f"{name}.pickle.xz"), 0)
    draw = random.Random(name)
    for moment in [draw.randrange(replayed.last_moment) for _ in range(10)] + [replayed.last_moment]:
        segments = segments_at(replayed, moment)
        free = sum(piece.size_bytes for segment in segments for piece in (*segment.free, *segment.waiting))

        blocks = [block for segment in segments for block in segment.blocks]
        assert sorted(blocks) == replayed.live_at(moment).tolist()
        assert sum(segment.size_bytes for segment in segments) == replayed.reserved_bytes[moment]
        assert free == replayed.reserved_bytes[moment] - replayed.allocated_bytes[moment]


def test_private_pools_of_graphs_are_known() -> None:
    replayed = replay(read_snapshot(RECORDINGS / "small-graphs.pickle.xz"), 0)

    pools = {segment.pool for segment in segments_at(replayed, replayed.last_moment)}

    assert (0, 0) in pools
    assert len(pools) > 1
