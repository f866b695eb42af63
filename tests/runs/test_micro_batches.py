"""The micro-batches that are left out of a step."""

import pytest

from ligerprof.runs.training import different_micro_batches


@pytest.mark.parametrize(
    ("count", "states", "expected"),
    [
        (9, "abcdefghi", [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (8, "abbb", [1, 2, 3]),
        # the states b and c take turns
        (8, "abcb", [1, 2, 3, 4]),
        (9, "abcbc", [1, 2, 3, 4, 9]),
        (3, "aab", [1, 2]),
        (1, "a", [1]),
    ],
)
def test_micro_batches_are_left_out_once_states_come_back(count: int, states: str, expected: list[int]) -> None:
    upcoming = iter(states)
    assert list(different_micro_batches(count, lambda: next(upcoming))) == expected
    assert list(different_micro_batches(count, None)) == list(range(1, count + 1))
