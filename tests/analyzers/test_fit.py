from hypothesis import given
from hypothesis import strategies as st

from ligerprof.analyzers.fit import find_border


@given(st.integers(0, 3000), st.integers(1, 3000), st.one_of(st.none(), st.integers(1, 3000)))
def test_find_border_is_the_last_count_that_fits_wherever_it_starts(border: int, start: int, most: int | None) -> None:
    asked: list[int] = []

    def fits(count: int) -> bool:
        asked.append(count)
        return count <= border

    found = find_border(fits, start=start, most=most)

    assert found == (border if most is None else min(border, most))
    assert min(asked) >= 1
    assert most is None or max(asked) <= most
