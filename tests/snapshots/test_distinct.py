"""Distinct rows and numbers are those that numpy finds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ligerprof.snapshots import trace as module
from ligerprof.snapshots.trace import distinct_rows, number_pairs

ROWS = st.lists(st.tuples(st.integers(-2, 2), st.booleans(), st.integers(0, 2**44)), min_size=1, max_size=40)


@settings(max_examples=50, deadline=None)
@given(rows=ROWS, copies=st.integers(1, 3), all_sums_collide=st.booleans())
def test_rows(rows: list[tuple[int, bool, int]], copies: int, all_sums_collide: bool) -> None:
    columns = [np.array(column) for column in zip(*(rows * copies), strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        if all_sums_collide:
            patch.setattr(module, "_ODD_NUMBER", 0)
        first, kind = distinct_rows(columns)

    table = list(zip(*(column.tolist() for column in columns), strict=True))
    assert [table[first[number]] for number in kind.tolist()] == table
    assert len({table[row] for row in first.tolist()}) == len(first)


@settings(max_examples=50, deadline=None)
@given(pairs=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=50), scale=st.sampled_from([1, 2**20]))
def test_pairs(pairs: list[tuple[int, int]], scale: int) -> None:
    order = {pair: number for number, pair in enumerate(sorted(set(pairs)))}
    firsts, seconds = np.array(pairs, dtype=np.int64).reshape(-1, 2).T * scale

    assert number_pairs(firsts, seconds).tolist() == [order[pair] for pair in pairs]
