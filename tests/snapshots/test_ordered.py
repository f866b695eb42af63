from hypothesis import given, settings
from hypothesis import strategies as st

from ligerprof.snapshots import ordered
from ligerprof.snapshots.ordered import OrderedFreeSpace, SortedAddresses
from ligerprof.snapshots.state import FreeSpace

SMALL = st.integers(0, 60)


@settings(deadline=None)
@given(first=st.sets(SMALL), changes=st.lists(SMALL, max_size=200), asked=st.lists(SMALL, max_size=20))
def test_sorted_addresses_find_what_a_search_of_all_finds(
    first: set[int], changes: list[int], asked: list[int]
) -> None:
    before, ordered._LONGEST_CHUNK = ordered._LONGEST_CHUNK, 4
    try:
        addresses, expected = SortedAddresses(first), set(first)
        for address in changes:
            (addresses.remove if address in expected else addresses.add)(address)
            expected ^= {address}
            for each in asked:
                assert addresses.last_until(each) == max((one for one in expected if one <= each), default=None)
    finally:
        ordered._LONGEST_CHUNK = before


@settings(deadline=None)
@given(
    borders=st.sets(SMALL, max_size=4),
    steps=st.lists(st.tuples(st.sampled_from(["give", "cut"]), SMALL, st.integers(1, 9)), max_size=80),
)
def test_ordered_space_is_the_space_without_an_order(borders: set[int], steps: list[tuple[str, int, int]]) -> None:
    plain, same = FreeSpace(), FreeSpace()
    for each in (plain, same):
        each.borders |= borders
    space = OrderedFreeSpace(same)
    free: set[int] = set()
    for action, start, size in steps:
        touched = set(range(start, start + size))
        if action == "cut":
            assert space.cut(start, size) == plain.cut(start, size)
            assert space.around(start) == plain.around(start)
        elif not touched & free:
            space.give(start, size)
            plain.give(start, size)
        free = {byte for begin, held in plain.starts.items() for byte in range(begin, begin + held)}
        assert (space.starts, space.ends) == (plain.starts, plain.ends)
    unordered = space.unordered()
    assert (unordered.starts, unordered.ends, unordered.borders) == (plain.starts, plain.ends, plain.borders)
