"""Allocators of long runs, in Python and compiled, against the allocator itself, on random programs."""

import tempfile
from collections.abc import Hashable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from ligerprof.errors import UnsupportedError
from ligerprof.torch_memory.allocator import states
from ligerprof.torch_memory.allocator.caching import AllocatorFullError, CachingAllocator
from ligerprof.torch_memory.allocator.settings import parse_allocator_settings
from ligerprof.torch_memory.allocator.states import (
    UNIT_BYTES,
    AllocatorState,
    CompiledState,
    RunAllocator,
    make_allocator,
    place_left,
)
from ligerprof.units import MIB

KINDS = (AllocatorState, CompiledState)
SETTINGS = (None, "expandable_segments:True", "roundup_power2_divisions:4")


def draw(random: Random, count: int) -> list[int]:
    """Sizes of allocations; 0 frees a random block."""
    sizes = (100, 512, 3000, 700_000, MIB, MIB + 1, 3 * MIB, 9 * MIB, 11 * MIB, 40 * MIB)
    return [random.choice((0, random.randint(1, random.choice(sizes)))) for _ in range(count)]


class Together:
    """The same events in the allocator and in both allocators of runs."""

    def __init__(self, text: str | None, limit_bytes: int | None) -> None:
        settings = parse_allocator_settings(text)
        self.oracle = CachingAllocator(settings=settings, limit_bytes=limit_bytes)
        self.allocators = [kind(settings, limit_bytes) for kind in KINDS]
        self.blocks: list[Any] = []

    def run(self, program: list[int], random: Random) -> bool:
        """Run a program in one call; False where memory runs out, in all."""
        operations, requests = [], []
        live = [-number for number in range(1, len(self.blocks) + 1)]
        for request in program:
            if request:
                operations.append(0)
                requests.append(request)
                live.append(len(requests))
            elif live:
                # often the youngest, as temporaries end
                operations.append(live.pop(random.choice((-1, random.randrange(len(live))))))
        return self.execute(operations, requests)

    def execute(self, operations: list[int], requests: list[int], name: Hashable = None) -> bool:
        """Run operations in one call; False where memory runs out, in all."""
        before: list[Any] = list(self.blocks)
        own: list[Any] = []
        full = False
        for operation in operations:
            if operation:
                blocks, place = (own, operation - 1) if operation > 0 else (before, -operation - 1)
                self.oracle.free(blocks[place])
                blocks[place] = None
                continue
            try:
                own.append(self.oracle.malloc(requests[len(own)]))
            except AllocatorFullError:
                full = True
                break
        self.blocks = place_left(before, own)
        for allocator in self.allocators:
            sizes = allocator.units_of(np.array(requests, np.int64))
            if full:
                with pytest.raises(AllocatorFullError) as caught:
                    allocator.run(np.array(operations, np.int32), sizes, name)
                assert caught.value.reserved_bytes == self.oracle.reserved_bytes
                assert caught.value.allocated_bytes == self.oracle.allocated_bytes
            else:
                allocator.run(np.array(operations, np.int32), sizes, name)
        return not full

    def check(self) -> None:
        for allocator in self.allocators:
            assert allocator.allocated * UNIT_BYTES == self.oracle.allocated_bytes
            assert allocator.reserved * UNIT_BYTES == self.oracle.reserved_bytes
            assert allocator.highest * UNIT_BYTES == self.oracle.highest_allocated_bytes
            assert allocator.highest_reserved * UNIT_BYTES == self.oracle.highest_reserved_bytes


@pytest.mark.parametrize("text", SETTINGS)
@pytest.mark.parametrize("number", range(6))
def test_a_run_decides_as_the_allocator_does(number: int, text: str | None) -> None:
    random = Random(number)
    together = Together(text, None)
    for _ in range(6):
        assert together.run(draw(random, 60), random)
        together.check()


def temporaries(random: Random) -> tuple[list[int], list[int]]:
    """Allocations with their frees; most programs leave no large block behind, and half of them some small ones."""
    operations, requests, live = [], [], []
    leaves_small, leaves_large = random.random() < 0.5, random.random() < 0.1
    for size in draw(random, 40):
        if size:
            operations.append(0)
            requests.append(size)
            live.append(len(requests))
        elif live:
            operations.append(live.pop(random.randrange(len(live))))
    for number in live:
        if not (leaves_large if requests[number - 1] > MIB else leaves_small):
            operations.append(number)
    return operations, requests


@pytest.mark.parametrize(
    ("text", "limit_bytes"), [*((text, None) for text in SETTINGS), (None, 110 * MIB), (None, 160 * MIB)]
)
@pytest.mark.parametrize("number", range(3))
def test_a_named_run_decides_so_each_time(number: int, text: str | None, limit_bytes: int | None) -> None:
    random = Random(number)
    together = Together(text, limit_bytes)
    programs = [temporaries(random) for _ in range(5)]
    for _ in range(60):
        name = random.randrange(len(programs))
        if not together.execute(*programs[name], name):
            break
        together.check()
        # free what is held, but for one block
        if len(together.blocks) > 20:
            assert together.execute([-number for number in range(2, len(together.blocks) + 1)], [])


def test_a_named_run_that_frees_a_larger_block_than_before_has_another_peak() -> None:
    together = Together(None, None)
    replaced = [-1, 0, 1, 0], [3 * MIB, 100]
    for operations, requests, name in (
        ([0], [100], None),
        (*replaced, "named"),
        (*replaced, "named"),
        ([-1, 0], [900_000], None),
        (*replaced, "named"),
    ):
        together.execute(operations, requests, name)
        together.check()


@pytest.mark.parametrize("number", range(12))
def test_a_limit_gives_back_segments_and_then_refuses(number: int) -> None:
    random = Random(number)
    together = Together(None, 150 * MIB)
    while together.run(draw(random, 30), random):
        together.check()
    together.check()
    assert together.oracle.reserved_bytes <= 150 * MIB


@pytest.mark.parametrize("text", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_comes_back_has_the_key_that_it_had(kind: type[RunAllocator], text: str | None) -> None:
    random = Random(1)
    allocator = kind(parse_allocator_settings(text))
    sizes = allocator.units_of(np.array([random.randint(1, 9 * MIB) for _ in range(1500)]))
    allocator.run(np.array([0] * 1500 + list(range(1, 1500, 2)), np.int32), sizes)
    key = allocator.key()
    # the second block of the run takes the place of the first one that was held
    allocator.run(np.array([0, 0, -1, 1], np.int32), sizes[[0, 2]])
    assert allocator.key() != key
    assert allocator.highest >= allocator.allocated
    again = kind(parse_allocator_settings(text))
    again.run(np.array([0] * 1500 + list(range(1, 1500, 2)), np.int32), sizes)
    assert again.key() == key
    again.run(np.array([0, 0, 1, 2], np.int32), sizes[:2])
    assert again.key() == key


@pytest.mark.parametrize("text", SETTINGS)
def test_many_requests_are_rounded_as_each_is(text: str | None) -> None:
    settings = parse_allocator_settings(text)
    requested = np.array([[1, 511, 512, 513], [MIB, MIB + 1, 3 * MIB + 7, 700 * MIB + 1]])
    expected = [[-(-settings.rules.round_request(size) // UNIT_BYTES) for size in row] for row in requested.tolist()]
    assert AllocatorState(settings).units_of(requested).tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
def test_settings_that_look_beyond_free_blocks_are_refused(kind: type[RunAllocator]) -> None:
    with pytest.raises(UnsupportedError, match="max_split_size_mb"):
        kind(parse_allocator_settings("max_split_size_mb:128"))


# 19 MiB stay free in front; behind, there is room for pages but not for a segment, which torch asks for first
@pytest.mark.parametrize(("operations", "mebibytes"), [([0, 0, 1, 0], [19, 19, 39]), ([0, 0], [21, 39])])
@pytest.mark.parametrize("kind", KINDS)
def test_pages_that_would_be_given_back_are_refused(
    kind: type[RunAllocator], operations: list[int], mebibytes: list[int]
) -> None:
    allocator = kind(parse_allocator_settings("expandable_segments:True"), 60 * MIB)
    sizes = allocator.units_of(np.array(mebibytes) * MIB)
    with pytest.raises(UnsupportedError, match="free pages"):
        allocator.run(np.array(operations, np.int32), sizes)


@pytest.mark.parametrize("named", ["env gcc", "no-such-compiler", "false", 'an "open quotation mark'])
def test_any_compiler_that_works_is_taken(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", named)
    states._library.cache_clear()
    assert states.can_compile()


def test_where_nothing_can_be_written_nothing_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    states._library.cache_clear()
    assert not states.can_compile()
    states._library.cache_clear()


def test_without_a_compiler_python_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = parse_allocator_settings(None)
    assert type(make_allocator(settings, None)) is CompiledState
    monkeypatch.setattr(states, "can_compile", lambda: False)
    assert type(make_allocator(settings, None)) is AllocatorState
