"""CUB's temporaries against blocks that an H200 allocated (torch 2.11)."""

import pytest

from ligerprof.gpus import GPUS
from ligerprof.torch_memory.sorting import count_bytes, masked_scatter_scratch, select_bytes


@pytest.mark.parametrize(
    ("flags", "counting_bytes", "selecting_bytes"),
    [(512, 1, 1023), (2328, 1, 1023), (512_000, 21503, 1791), (3_684_352, 21503, 7935)],
)
def test_nonzero(flags: int, counting_bytes: int, selecting_bytes: int) -> None:
    assert count_bytes(flags, GPUS["h200"]) == counting_bytes
    assert select_bytes(flags) == selecting_bytes


def test_masked_scatter() -> None:
    assert masked_scatter_scratch(2328, copies_mask=False) == (18624, 1279, -1279, -18624)
    mask_bytes = 512_000
    blocks = (8 * mask_bytes, mask_bytes, 10239)
    assert masked_scatter_scratch(mask_bytes, copies_mask=True) == (*blocks, *(-size for size in reversed(blocks)))
