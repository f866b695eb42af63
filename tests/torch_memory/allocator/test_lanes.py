"""Lanes against one state of the allocator per lane, on random programs."""

from random import Random

import numpy as np
import pytest

from ligerprof.torch_memory.allocator.lanes import Lanes, prepare
from ligerprof.torch_memory.allocator.settings import parse_allocator_settings
from ligerprof.torch_memory.allocator.states import SMALL_UNITS, AllocatorState, Block
from ligerprof.units import MIB

SETTINGS = (None, "expandable_segments:True", "roundup_power2_divisions:4")
SIZES = (512, 3000, 200_000, MIB, 3 * MIB, 9 * MIB, 11 * MIB, 30 * MIB)
LANES = 7


def draw_operations(random: Random, count: int, held: int) -> list[int]:
    """Allocations and frees of blocks of this program or of `held` earlier ones, most often of the youngest."""
    operations: list[int] = []
    live = [-number for number in range(1, held + 1)]
    made = 0
    for _ in range(count):
        if not live or random.random() < 0.55:
            made += 1
            operations.append(0)
            live.append(made)
        else:
            operations.append(live.pop(-1 if random.random() < 0.5 else random.randrange(len(live))))
    return operations


def used_state(random: Random, text: str | None) -> tuple[AllocatorState, list[Block]]:
    """A state with free blocks of many sizes, and the blocks that are held."""
    state = AllocatorState(parse_allocator_settings(text))
    sizes = [state.units(random.randint(1, random.choice(SIZES))) for _ in range(160)]
    freed = random.sample(range(1, 161), 130)
    return state, state.run([0] * len(sizes) + freed, sizes, [])


@pytest.mark.parametrize("text", SETTINGS)
@pytest.mark.parametrize("number", range(25))
def test_every_lane_is_a_state_of_its_own(number: int, text: str | None) -> None:
    random = Random(number)
    state, held = used_state(random, text)
    lanes, alone = Lanes(state, LANES), [(state.copy(), held) for _ in range(LANES)]
    for own, _ in alone:
        own.highest = own.allocated
    for _ in range(3):
        operations = draw_operations(random, random.choice((6, 30, 80)), len(lanes.held))
        # alike in their pools
        classes = [random.choice(SIZES) for operation in operations if operation == 0]
        columns = []
        for _ in range(LANES):
            drawn = [state.units(random.randint(size // 2, size)) for size in classes]
            columns.append(
                [
                    min(u, SMALL_UNITS) if s <= MIB else max(u, SMALL_UNITS + 1)
                    for u, s in zip(drawn, classes, strict=True)
                ]
            )
        events = prepare(operations, [size <= MIB for size in classes], [block.small for block in lanes.held])
        lanes.run(events, np.array(columns, np.int64).reshape(LANES, -1).T[:, : lanes.count])
        # blocks of the state come first, and stay
        shifted = [operation - len(held) if operation < 0 else operation for operation in operations]
        for lane in range(LANES):
            own, before = alone[lane]
            alone[lane] = (own, own.run(shifted, columns[lane], before))
        needs = [own.reserved > state.reserved for own, _ in alone]
        assert lanes.count == (needs.index(True) if any(needs) else LANES)
        if lanes.count == 0:
            return
    for lane in range(lanes.count):
        own, blocks = alone[lane]
        assert (lanes.allocated[lane], lanes.highest[lane]) == (own.allocated, own.highest)
        assert [int(block.size[lane]) for block in lanes.held] == [size for _, size in blocks[len(held) :]]
