"""States of the allocator against the allocator itself, on random programs."""

from random import Random
from typing import Any

import numpy as np
import pytest

from ligerprof.errors import UnsupportedError
from ligerprof.torch_memory.allocator.caching import AllocatorFullError, CachingAllocator
from ligerprof.torch_memory.allocator.settings import parse_allocator_settings
from ligerprof.torch_memory.allocator.states import UNIT_BYTES, AllocatorState
from ligerprof.units import MIB

SETTINGS = (None, "expandable_segments:True", "roundup_power2_divisions:4")


def draw(random: Random, count: int) -> list[int]:
    """Sizes of allocations; 0 frees a random block."""
    sizes = (100, 512, 3000, 700_000, MIB, MIB + 1, 3 * MIB, 9 * MIB, 11 * MIB, 40 * MIB)
    return [random.choice((0, random.randint(1, random.choice(sizes)))) for _ in range(count)]


class Both:
    """The same events in the allocator and in a state."""

    def __init__(self, text: str | None, limit_bytes: int | None) -> None:
        settings = parse_allocator_settings(text)
        self.oracle = CachingAllocator(settings=settings, limit_bytes=limit_bytes)
        self.state = AllocatorState(settings, limit_bytes)
        self.blocks: list[Any] = []
        self.held: list[tuple[int, int]] = []

    def run(self, program: list[int], random: Random) -> bool:
        """Run a program in one call of the state; False where memory runs out, in both."""
        operations, sizes, live = [], [], [("held", index) for index in range(len(self.held))]
        full = False
        for request in program:
            if request:
                operations.append(0)
                sizes.append(self.state.units(request))
                live.append(("own", len(sizes)))
                try:
                    self.blocks.append(self.oracle.malloc(request))
                except AllocatorFullError:
                    full = True
                    break
            elif live:
                index = random.randrange(len(live))
                kind, number = live.pop(index)
                operations.append(number if kind == "own" else -number - 1)
                self.oracle.free(self.blocks.pop(index))
        try:
            self.held = self.state.run(operations, sizes, self.held)
        except AllocatorFullError:
            assert full
            return False
        assert not full
        return True

    def check(self) -> None:
        assert self.state.allocated * UNIT_BYTES == self.oracle.allocated_bytes
        assert self.state.reserved * UNIT_BYTES == self.oracle.reserved_bytes
        assert self.state.highest * UNIT_BYTES == self.oracle.highest_allocated_bytes
        assert self.state.highest_reserved * UNIT_BYTES == self.oracle.highest_reserved_bytes
        sizes = [size * UNIT_BYTES for _, size in self.held]
        assert sizes == [block.size_bytes for block in self.blocks]


@pytest.mark.parametrize("text", SETTINGS)
@pytest.mark.parametrize("number", range(6))
def test_a_state_decides_as_the_allocator_does(number: int, text: str | None) -> None:
    random = Random(number)
    both = Both(text, None)
    for _ in range(6):
        assert both.run(draw(random, 60), random)
        both.check()
        # a copy goes its own way
        both.state.copy().run([0, 0], [1, 9000], both.held)


@pytest.mark.parametrize("number", range(12))
def test_a_limit_gives_back_segments_and_then_refuses(number: int) -> None:
    random = Random(number)
    both = Both(None, 150 * MIB)
    while both.run(draw(random, 30), random):
        both.check()
    assert both.state.reserved * UNIT_BYTES <= 150 * MIB


@pytest.mark.parametrize("text", SETTINGS)
def test_many_requests_are_rounded_as_each_is(text: str | None) -> None:
    state = AllocatorState(parse_allocator_settings(text))
    requested = np.array([[1, 511, 512, 513], [MIB, MIB + 1, 3 * MIB + 7, 700 * MIB + 1]])
    expected = [[state.units(size) for size in row] for row in requested.tolist()]
    assert state.units_of(requested).tolist() == expected


def test_settings_that_look_beyond_free_blocks_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="max_split_size_mb"):
        AllocatorState(parse_allocator_settings("max_split_size_mb:128"))


def test_pages_that_would_be_given_back_are_refused() -> None:
    state = AllocatorState(parse_allocator_settings("expandable_segments:True"), 60 * MIB)
    units = [state.units(size * MIB) for size in (19, 19, 39)]
    with pytest.raises(UnsupportedError, match="free pages"):
        # 19 MiB stay free in front
        state.run([0, 0, 1, 0], units, [])
