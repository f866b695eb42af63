"""What a norm rounds to the dtype of its result, by name."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Literal, get_args

import triton
import triton.language as tl

Casting = Literal["gemma", "llama", "none"]
CASTINGS: tuple[str, ...] = get_args(Casting)


@triton.jit
def round_to(value, pointer):
    """An fp32 value rounded to the dtype of what a pointer points at."""
    return value.to(pointer.dtype.element_ty).to(tl.float32)
