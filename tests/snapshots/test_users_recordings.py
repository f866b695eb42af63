"""Recordings of typical user scripts (benchmarks/recordings.py): exact counters, and the allocator's choices."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from ligerprof.snapshots.reader import Snapshot, read_snapshot
from ligerprof.snapshots.replay import replay
from ligerprof.torch_memory.allocator.caching import AllocatorFullError, Block, CachingAllocator
from tests.paths import RECORDINGS

RUNS: dict[str, dict[str, Any]] = json.loads((RECORDINGS / "users.json").read_text(encoding="utf-8"))
LOST_THEIR_BEGINNING = {"small-ring-3000"}
# recordings of other training setups, with segments from cudaMalloc
OTHERS = (
    "hf-ckpt-4x1024",
    "hf-nockpt-8x1024",
    "hf-4.45-ckpt-4x1024",
    "liger-flce-ckpt-4x1024",
    "stamped-amp-ckpt-4x1024",
    "zero3-offload-4x1024",
    "small-python-alloc-nockpt",
    "small-sgd-accum",
    "small-streams",
    "small-two-devices",
    "small-zero2",
    "small-zero3",
)

Event = dict[str, Any]
Pool = tuple[int, int]
DEFAULT_POOL = (0, 0)


def recorded(name: str) -> Snapshot:
    return read_snapshot(RECORDINGS / f"{name}.pickle.xz")


def events_of(snapshot: Snapshot) -> list[Event]:
    return [dict(event) for event in snapshot.trace_of(0)]


@pytest.mark.parametrize("name", sorted(RUNS))
def test_replay_gives_the_runs_own_counters_to_the_byte(name: str) -> None:
    replayed = replay(recorded(name), 0)

    assert replayed.allocated_bytes.max() == RUNS[name]["peak_bytes"]
    assert replayed.reserved_bytes.max() == RUNS[name]["reserved_bytes"]
    assert replayed.complete == (name not in LOST_THEIR_BEGINNING)
    assert replayed.verified


class Machine:
    """One allocator per stream and pool, since their blocks never mix; the driver returns recorded addresses."""

    def __init__(self, snapshot: Snapshot, limit_bytes: int | None) -> None:
        self._given = iter([event for event in events_of(snapshot) if event["action"] == "segment_alloc"])
        # events of torch 2.11 do not contain their pool; a graph's pool keeps its segments to the end
        self._private = [
            (segment["stream"], range(segment["address"], segment["address"] + segment["total_size"]), pool)
            for segment in snapshot.segments_of(0)
            if (pool := segment.get("segment_pool_id", DEFAULT_POOL)) != DEFAULT_POOL
        ]
        self._limit_bytes = limit_bytes
        self._allocators: dict[tuple[int, Pool], CachingAllocator] = {}
        self._blocks: dict[int, tuple[CachingAllocator, Block]] = {}
        self._next = next(self._given)
        self.segment_events: list[tuple[str, int, int]] = []
        self.elsewhere = 0

    def take(self, event: Event) -> None:
        if event["action"] in ("alloc", "oom"):
            self._malloc(event)
        elif event["action"] == "free_completed":
            allocator, block = self._blocks.pop(event["addr"])
            allocator.free(block)
        elif event["action"] == "segment_free" and self._whole(event) not in self.segment_events:
            # not caused by a request: the program emptied the cache
            for (_, pool), allocator in self._allocators.items():
                if pool == DEFAULT_POOL:
                    allocator.empty_cache()

    def _whole(self, event: Event) -> tuple[str, int, int]:
        return event["action"], event["addr"], event["size"]

    def _malloc(self, event: Event) -> None:
        allocator = self._allocators.setdefault(
            (event["stream"], self._pool(event)),
            CachingAllocator(limit_bytes=self._limit_bytes, observe=self._observe),
        )
        # a segment lies right below the allocator's next address
        allocator._next_address = self._next["addr"] + self._next["size"]
        if event["action"] == "oom":
            with pytest.raises(AllocatorFullError):
                allocator.malloc(event["size"])
            return
        block = allocator.malloc(event["size"])
        self.elsewhere += block.address != event["addr"]
        self._blocks[event["addr"]] = allocator, block

    def _pool(self, event: Event) -> Pool:
        for stream, addresses, pool in self._private:
            if event["stream"] == stream and event.get("addr") in addresses:
                return pool
        return DEFAULT_POOL

    def _observe(self, action: str, address: int, size_bytes: int, _context: object) -> None:
        if not action.startswith("segment"):
            return
        self.segment_events.append((action, address, size_bytes))
        if action == "segment_alloc":
            self._next = next(self._given, self._next)


def driver_events(events: list[Event]) -> Iterator[tuple[str, int, int]]:
    return (
        (event["action"], event["addr"], event["size"]) for event in events if event["action"].startswith("segment")
    )


@pytest.mark.parametrize("name", [*sorted(set(RUNS) - LOST_THEIR_BEGINNING), *OTHERS])
def test_requests_alone_give_every_block_and_segment_its_address(name: str) -> None:
    snapshot = recorded(name)
    events = events_of(snapshot)
    machine = Machine(snapshot, RUNS.get(name, {}).get("limit_bytes"))

    for event in events:
        machine.take(event)

    assert machine.elsewhere == 0
    # segments released together have no defined order
    assert sorted(machine.segment_events) == sorted(driver_events(events))


# difference from the GPU in bytes: the allocator takes the lowest address among free blocks of equal size, and
# addresses depend on the driver
MOVED_BY_ADDRESSES = {
    "small-autocast": 512 * 1024,
    "small-autocast-python": 512 * 1024,
    "small-liger-all": -3584 * 1024,
    "small-liger-all-python": -3584 * 1024,
}


@pytest.mark.parametrize("name", sorted(set(RUNS) - LOST_THEIR_BEGINNING - {"small-graphs", "small-oom"}))
def test_with_other_addresses_reserved_is_equal_and_allocated_differs_by_the_listed_bytes(name: str) -> None:
    allocator = CachingAllocator()
    blocks: dict[int, Block] = {}
    for event in events_of(recorded(name)):
        if event["action"] == "alloc":
            blocks[event["addr"]] = allocator.malloc(event["size"])
        elif event["action"] == "free_completed":
            allocator.free(blocks.pop(event["addr"]))

    assert allocator.highest_reserved_bytes == RUNS[name]["reserved_bytes"]
    assert allocator.highest_allocated_bytes - RUNS[name]["peak_bytes"] == MOVED_BY_ADDRESSES.get(name, 0)
