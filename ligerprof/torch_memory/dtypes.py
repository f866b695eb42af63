"""Bytes per element of dtypes, and the blocks that an operator allocates and frees while it runs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate

FP32_BYTES = 4
HALF_BYTES = 2
INT32_BYTES = 4
# int64: tokens, labels, positions and the indices that CUDA kernels sort
INDEX_BYTES = 8
DTYPE_BYTES: Mapping[str, int] = {"float32": FP32_BYTES, "bfloat16": HALF_BYTES, "float16": HALF_BYTES}


def dtype_name(dtype: object) -> str:
    """The name here of a torch.dtype, such as `float32`."""
    return str(dtype).removeprefix("torch.")


# bytes: above zero a block is allocated, below zero the oldest block of that size is freed
Scratch = tuple[int, ...]


def together(*sizes_bytes: int) -> Scratch:
    """Blocks held together and freed in reverse order, as C++ destroys locals; sizes of 0 are skipped."""
    sizes = [size for size in sizes_bytes if size]
    return (*sizes, *(-size for size in reversed(sizes)))


def highest_bytes(scratch: Sequence[int]) -> int:
    """The most bytes that are allocated at once."""
    return max(accumulate(scratch), default=0)


def highest_moment(scratch: Scratch) -> list[int]:
    """The blocks that are allocated when most bytes are."""
    most_bytes, held = highest_bytes(scratch), Counter[int]()
    for size, total_bytes in zip(scratch, accumulate(scratch), strict=True):
        held[abs(size)] += 1 if size > 0 else -1
        if total_bytes == most_bytes:
            break
    return list(held.elements())
