import random
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ligerprof.errors import RecipeError, UnsupportedError
from ligerprof.snapshots.reader import Snapshot, read_snapshot
from ligerprof.snapshots.replay import replay
from ligerprof.snapshots.writer import EventContext, TraceEvent, build_snapshot
from ligerprof.torch_memory.allocator.caching import AllocatorFullError, Block, CachingAllocator, segment_bytes
from ligerprof.torch_memory.allocator.settings import AllocatorSettings, parse_allocator_settings
from tests.paths import RECORDINGS
from tests.torch_memory.allocator.programs import KIB, MIB, SlowAllocator

# torch.cuda.max_memory_allocated() and max_memory_reserved() of recorded runs
MEASURED = {
    "hf-ckpt-4x1024": (14124071936, 17777557504),
    "liger-flce-ckpt-4x1024": (10538196480, 11096031232),
    "hf-nockpt-8x1024": (34470623232, 35989225472),
    "hf-4.45-ckpt-4x1024": (14120016896, 17844666368),
}
CONFIGURATIONS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:32",
    "max_split_size_mb:64,max_non_split_rounding_mb:40",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[16:8,64:2,>:1],garbage_collection_threshold:0.6",
)


def random_steps(seed: int, count: int) -> Iterator[tuple[str, int]]:
    """Allocations by size, frees by a number to draw from the living with, and emptied caches."""
    draw = random.Random(seed)
    living = 0
    for _ in range(count):
        choice = draw.random()
        if choice < 0.55 or not living:
            living += 1
            yield "alloc", draw.randint(1, draw.choice([KIB, MIB, 4 * MIB, 60 * MIB]))
        elif choice < 0.97:
            living -= 1
            yield "free", draw.randrange(living + 1)
        else:
            yield "empty", 0


class Recorded:
    """A CachingAllocator with its events."""

    def __init__(self, configuration: AllocatorSettings, limit_bytes: int | None = None) -> None:
        self.configuration = configuration
        self.events: list[TraceEvent] = []
        self.blocks: list[Block] = []
        self.allocator = CachingAllocator(settings=configuration, limit_bytes=limit_bytes, observe=self.keep)

    def keep(self, action: str, address: int, size_bytes: int, _context: object) -> None:
        self.events.append(TraceEvent(action, address, size_bytes, EventContext("")))

    def run(self, steps: Iterator[tuple[str, int]]) -> None:
        for step, number in steps:
            if step == "alloc":
                self.blocks.append(self.allocator.malloc(number))
            elif step == "free":
                self.allocator.free(self.blocks.pop(number))
            else:
                self.allocator.empty_cache()

    def snapshot(self) -> dict[str, Any]:
        return build_snapshot(self.allocator, self.events, self.configuration)


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_event_and_address_is_that_of_a_slow_allocator(seed: int) -> None:
    slow, fast = SlowAllocator(), Recorded(AllocatorSettings())
    owners: list[int] = []
    for number, (step, value) in enumerate(random_steps(seed, 150)):
        if step == "alloc":
            owners.append(number)
            slow.alloc(number, value)
        elif step == "free":
            owner = owners.pop(value)
            slow.request_free(owner)
            slow.complete_free(owner)
        else:
            slow.empty_cache()
    fast.run(random_steps(seed, 150))

    # both hand addresses out downwards, from tops of their own; the order of freed segments is the allocator's own
    tops = [max((event["addr"] for event in slow.events), default=0), max((e.address for e in fast.events), default=0)]
    slow_events = [(event["action"], event["addr"] - tops[0], event["size"]) for event in slow.events]
    fast_events = [(event.action, event.address - tops[1], event.size_bytes) for event in fast.events]
    assert sorted_frees(fast_events) == sorted_frees(slow_events)
    assert fast.allocator.allocated_bytes == slow.allocated[-1]
    assert fast.allocator.reserved_bytes == slow.reserved[-1]
    assert fast.allocator.highest_reserved_bytes == max(slow.reserved)


def sorted_frees(events: list[tuple[str, int, int]]) -> list[Any]:
    """Events with each run of freed segments in order of address."""
    result: list[Any] = []
    run: list[tuple[str, int, int]] = []
    for event in [*events, ("end", 0, 0)]:
        if event[0] == "segment_free":
            run.append(event)
            continue
        result += [*sorted(run), event]
        run = []
    return result


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32), text=st.sampled_from(CONFIGURATIONS), limited=st.booleans())
def test_a_replay_of_its_snapshot_gives_its_own_counters(seed: int, text: str, limited: bool) -> None:
    machine = Recorded(parse_allocator_settings(text), limit_bytes=600 * MIB if limited else None)
    with suppress(AllocatorFullError):
        machine.run(random_steps(seed, 150))

    replayed = replay(Snapshot.from_dict(machine.snapshot()), 0)

    allocator = machine.allocator
    assert replayed.verified
    assert replayed.complete
    assert replayed.allocated_bytes[-1] == allocator.allocated_bytes
    assert replayed.allocated_bytes.max() == allocator.highest_allocated_bytes
    assert replayed.reserved_bytes[-1] == allocator.reserved_bytes
    assert replayed.reserved_bytes.max() == allocator.highest_reserved_bytes
    assert sum(block.requested_bytes for block in machine.blocks) == allocator.requested_bytes
    if limited:
        assert allocator.highest_reserved_bytes <= 600 * MIB


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), text=st.sampled_from(CONFIGURATIONS))
def test_blocks_lie_side_by_side_and_no_two_free_ones_touch(seed: int, text: str) -> None:
    machine = Recorded(parse_allocator_settings(text))
    machine.run(random_steps(seed, 150))

    held = 0
    for blocks in machine.allocator.segments():
        for left, right in pairwise(blocks):
            assert left.address + left.size_bytes == right.address
            assert left.allocated or right.allocated
        held += sum(block.size_bytes for block in blocks if block.allocated)
    assert held == machine.allocator.allocated_bytes


@pytest.mark.parametrize("name", sorted(MEASURED))
def test_the_requests_of_a_recording_reserve_what_the_gpu_reserved(name: str) -> None:
    allocator = CachingAllocator()
    blocks: dict[int, Block] = {}
    for event in read_snapshot(RECORDINGS / f"{name}.pickle.xz").trace_of(0):
        if event["action"] == "alloc":
            blocks[event["addr"]] = allocator.malloc(event["size"])
        elif event["action"] == "free_completed":
            allocator.free(blocks.pop(event["addr"]))

    assert (allocator.highest_allocated_bytes, allocator.highest_reserved_bytes) == MEASURED[name]


def test_what_is_cached_is_given_back_before_memory_runs_out() -> None:
    machine = Recorded(AllocatorSettings(), limit_bytes=100 * MIB)
    machine.allocator.free(machine.allocator.malloc(60 * MIB))

    machine.allocator.malloc(80 * MIB)

    actions = [event.action for event in machine.events]
    assert actions[-3:] == ["segment_free", "segment_alloc", "alloc"]
    with pytest.raises(AllocatorFullError) as caught:
        machine.allocator.malloc(40 * MIB)
    assert caught.value.limit_bytes == 100 * MIB
    assert caught.value.reserved_bytes == caught.value.allocated_bytes == 80 * MIB


def test_garbage_is_collected_above_the_threshold() -> None:
    kept, collected = (Recorded(parse_allocator_settings(text), limit_bytes=1000 * MIB) for text in CONFIGURATIONS[::5])
    for machine in (kept, collected):
        machine.allocator.free(machine.allocator.malloc(700 * MIB))
        machine.allocator.malloc(800 * KIB)
    assert kept.allocator.reserved_bytes == 702 * MIB
    assert collected.allocator.reserved_bytes == 2 * MIB


@pytest.mark.parametrize(
    ("rounded", "segment"),
    [(512, 2 * MIB), (MIB, 2 * MIB), (MIB + 512, 20 * MIB), (10 * MIB - 512, 20 * MIB), (10 * MIB, 10 * MIB)],
)
def test_segments_have_the_sizes_of_the_pools(rounded: int, segment: int) -> None:
    assert segment_bytes(rounded) == segment


def test_settings_are_read_as_torch_reads_them() -> None:
    read = parse_allocator_settings("max_split_size_mb: 128, roundup_power2_divisions:[256:1,512:2,1024:4,>:8]")
    assert read.rules.max_split_bytes == 128 * MIB
    # everything up to the first boundary takes its count, `>` what comes after the last
    assert read.rules.roundup_divisions == (1,) * 9 + (2, 4) + (8,) * 5
    assert read.to_snapshot()["roundup_power2_divisions"]["512"] == 2


@pytest.mark.parametrize("text", ["backend:cudaMallocAsync", "per_process_memory_fraction:0.5", "unheard_of:1"])
def test_settings_that_are_not_modelled_are_refused(text: str) -> None:
    with pytest.raises(UnsupportedError, match=text.split(":", maxsplit=1)[0]):
        parse_allocator_settings(text)


@pytest.mark.parametrize(
    "text",
    ["max_split_size_mb:20", "max_split_size_mb", "expandable_segments:yes", "garbage_collection_threshold:1.5", "a b"],
)
def test_settings_that_torch_refuses_are_usage_errors(text: str) -> None:
    with pytest.raises(RecipeError):
        parse_allocator_settings(text)


def test_an_expandable_recording_is_mapped_and_unmapped_as_the_gpu_did() -> None:
    """Every block at its place in its segment, every page given back: pages are counted from a segment's beginning."""
    events = read_snapshot(RECORDINGS / "small-expandable.pickle.xz").trace_of(0)
    machine = Recorded(parse_allocator_settings("expandable_segments:True"))
    blocks: dict[int, Block] = {}
    distances: dict[bool, set[int]] = {True: set(), False: set()}
    emptied = False
    for event in events:
        if event["action"] == "alloc":
            blocks[event["addr"]] = block = machine.allocator.malloc(event["size"])
            distances[event["size"] <= MIB].add(block.address - event["addr"])
        elif event["action"] == "free_completed":
            machine.allocator.free(blocks.pop(event["addr"]))
        elif event["action"] == "segment_unmap" and not emptied:
            machine.allocator.empty_cache()
        emptied = event["action"] == "segment_unmap"

    ours = [(event.action, event.size_bytes) for event in machine.events if event.action.startswith("segment")]
    assert ours == [(event["action"], event["size"]) for event in events if event["action"].startswith("segment")]
    assert [len(each) for each in distances.values()] == [1, 1]


def test_a_free_block_serves_its_own_stream_alone() -> None:
    for text in ("", "expandable_segments:True"):
        allocator = CachingAllocator(settings=parse_allocator_settings(text))
        freed = allocator.malloc(24 * MIB, stream=1)
        allocator.free(freed)
        other = allocator.malloc(24 * MIB)
        again = allocator.malloc(24 * MIB, stream=1)
        assert other.address != freed.address == again.address
        assert (other.pool.stream, again.pool.stream) == (0, 1)
        allocator.free(again)
        allocator.empty_cache()
        assert allocator.reserved_bytes == allocator.allocated_bytes + (-24 * MIB) % (20 * MIB if text else 1)
