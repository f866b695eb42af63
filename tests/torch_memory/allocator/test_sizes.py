import pytest
from hypothesis import given
from hypothesis import strategies as st

from ligerprof.torch_memory.allocator.settings import SizeRules

MIB = 2**20


@given(requested=st.integers(1, 2**40))
def test_requests_are_rounded_up_to_the_next_512_bytes(requested: int) -> None:
    rounded = SizeRules().round_request(requested)

    assert rounded % 512 == 0
    assert requested <= rounded < requested + 512


@given(requested=st.integers(2 * MIB, 2**40), divisions=st.sampled_from([2, 4, 8, 16]))
def test_divisions_leave_few_sizes_between_powers_of_two(requested: int, divisions: int) -> None:
    rounded = SizeRules(roundup_divisions=(divisions,) * 16).round_request(requested)

    power = 1 << (requested.bit_length() - 1)
    steps = [power + power * step // divisions for step in range(divisions + 1)]
    assert rounded == next(size for size in steps if size >= requested)


def test_settings_of_a_snapshot_name_the_divisions_by_mebibytes() -> None:
    rules = SizeRules.from_settings({"roundup_power2_divisions": {"1": 0, "2": 0, "4": 2}, "max_split_size": -1})

    assert rules.round_request(3 * MIB + 1) == 3 * MIB + 512
    assert rules.round_request(5 * MIB) == 6 * MIB
    assert rules.round_request(100 * MIB) == 128 * MIB


@pytest.mark.parametrize(
    ("rules", "block_bytes", "rest_bytes", "splits"),
    [
        (SizeRules(), MIB, 512, True),
        (SizeRules(), MIB, 0, False),
        (SizeRules(), MIB + 512, MIB, False),
        (SizeRules(), MIB + 512, MIB + 512, True),
        (SizeRules(expandable_segments=True), MIB + 512, 512, True),
        (SizeRules(max_split_bytes=32 * MIB), 32 * MIB, 20 * MIB, False),
        (SizeRules(max_split_bytes=32 * MIB), 31 * MIB, 20 * MIB, True),
    ],
)
def test_rest_is_split_off_by_pool_and_settings(
    rules: SizeRules, block_bytes: int, rest_bytes: int, splits: bool
) -> None:
    assert rules.splits_off(block_bytes, rest_bytes) is splits


@pytest.mark.parametrize("value", [True, False, 0, -1, 1.5, "1", None, [32 * MIB], float("nan")], ids=repr)
def test_a_largest_split_that_is_not_a_size_is_none(value: object) -> None:
    assert SizeRules.from_settings({"max_split_size": value}).max_split_bytes is None
    assert SizeRules.from_settings({"max_split_size": 32 * MIB}).max_split_bytes == 32 * MIB
