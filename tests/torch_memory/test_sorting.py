"""Temporaries of torch.sort, against blocks that an H200 recorded."""

import pytest

from ligerprof.torch_memory.dtypes import Scratch
from ligerprof.torch_memory.sorting import accumulation_scratch, sort_scratch


@pytest.mark.parametrize(
    ("elements", "row", "width", "inner", "measured"),
    [
        (64 * 1000, 1000, 4, True, (8000, -8000)),
        (1_000_000, 1_000_000, 4, True, (8000000, 12200191, -12200191, -8000000)),
        (1_000_000, 1_000_000, 2, True, (8000000, 10187007, -10187007, -8000000)),
        (
            64 * 30000,
            30000,
            4,
            True,
            (15360000, 15360000, 7680000, 23415295, -23415295, -7680000, 344575, -344575, -15360000, -15360000),
        ),
    ],
)
def test_sort(elements: int, row: int, width: int, inner: bool, measured: Scratch) -> None:
    assert sort_scratch(elements, row, width, inner=inner) == measured


@pytest.mark.parametrize(("dims", "rows", "blocks", "highest"), [(1, 512, 5, 53759), (2, 512000, 7, 55807)])
def test_index_put_sorts_its_indices(dims: int, rows: int, blocks: int, highest: int) -> None:
    scratch = accumulation_scratch(3000, dims, rows)
    assert [size for size in scratch if size > 0] == [24000] * blocks + [highest]
    assert sum(scratch) == 0
