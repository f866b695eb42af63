"""How a reduction that is too large for 32-bit offsets splits; tests/kernels compares its workspaces with torch's."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ligerprof.torch_memory import reductions
from ligerprof.torch_memory.reductions import Axes, axes_of, split_to_32_bit


def halved(axes: Axes) -> list[Axes]:
    """All pieces, by recursion as torch does."""
    if not axes.needs_64_bit:
        return [axes]
    return [piece for half in reductions._halves(axes) for piece in halved(half)]


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 2**22), columns=st.integers(1, 2**17), element_bytes=st.sampled_from([2, 4]))
def test_pieces_are_torchs_and_cover_the_tensor(rows: int, columns: int, element_bytes: int) -> None:
    axes = axes_of((rows, columns), (columns, 1), element_bytes, (0,))
    pieces = split_to_32_bit(axes)
    assert sum(piece.inputs * piece.outputs for piece in halved(axes)) == rows * columns
    if len(halved(axes)) <= reductions._MOST_PIECES:
        assert pieces == halved(axes)
    assert list(dict.fromkeys(pieces)) == list(dict.fromkeys(halved(axes)))


@pytest.mark.parametrize(("rows", "columns"), [(4096, 1677721601), (2**31 - 1, 2**31 - 1), (7, 2**62 + 1)])
def test_tensor_that_fits_no_device_has_few_pieces(rows: int, columns: int) -> None:
    pieces = split_to_32_bit(axes_of((rows, columns), (columns, 1), 4, (0,)))
    assert 1 <= len(pieces) <= reductions._MOST_PIECES
    assert not any(piece.needs_64_bit for piece in pieces)
