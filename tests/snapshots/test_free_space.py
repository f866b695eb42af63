"""Searches for the free block around an address, against a search through all of them."""

import random

import pytest

from ligerprof.snapshots.state import FreeSpace

PAGES = 400


def slow_around(space: FreeSpace, address: int) -> tuple[int, int] | None:
    return next(((start, size) for start, size in space.starts.items() if start <= address < start + size), None)


@pytest.mark.parametrize("seed", range(8))
def test_free_block_around_an_address_is_found_after_any_changes(seed: int) -> None:
    draw, space = random.Random(seed), FreeSpace()
    space.give(0, PAGES)
    for _ in range(600):
        address = draw.randrange(PAGES)
        assert space.around(address) == slow_around(space, address)
        if draw.random() < 0.5:
            space.cut(address, draw.randint(1, 3))
        elif space.around(address) is None:
            space.give(address, 1)
        if draw.random() < 0.2 and space.starts:
            # as replays do it
            start = draw.choice(list(space.starts))
            size = space.starts.pop(start)
            space.ends.pop(start + size)
            if draw.random() < 0.5:
                # back again, as the newest
                space.starts[start], space.ends[start + size] = size + 0, start


def test_searches_in_blocks_that_only_grow_in_number_sort_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    space, count = FreeSpace(), 2000
    for place in range(count):
        space.give(10 * place, 8)
    looked_at = 0

    class Counted(dict[int, int]):
        def __reversed__(self):  # type: ignore[no-untyped-def]
            nonlocal looked_at
            for key in list(self)[::-1]:
                looked_at += 1
                yield key

    space.starts = Counted(space.starts)
    for place in range(count):
        assert space.cut(10 * place + 3, 2)

    assert looked_at < 10 * count
