"""Functions that run at the same time: all results, in order; any error."""

import threading

import pytest

from ligerprof.snapshots.parallel import at_once


def test_functions_run_at_the_same_time_and_their_results_keep_their_order() -> None:
    # each waits for the other one
    barrier = threading.Barrier(2, timeout=60)

    assert [place for place, _ in at_once([lambda: (1, barrier.wait()), lambda: (2, barrier.wait())])] == [1, 2]


@pytest.mark.parametrize("place", [0, 1])
def test_an_error_in_any_of_them_is_raised_once_all_have_ended(place: int) -> None:
    ended: list[int] = []

    def fail() -> None:
        raise MemoryError("too large")

    functions = [lambda: ended.append(0), lambda: ended.append(1)]
    functions[place] = fail

    with pytest.raises(MemoryError, match="too large"):
        at_once(functions)

    assert ended == [1 - place]
