"""Convert bytes to text and back; the only module that formats MiB and GiB."""

import re
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

from ligerprof.errors import RecipeError

MIB = 2**20
GIB = 2**30

# k, kb and kib differ: 1024, 1000 and 1024 bytes
_FACTORS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _FACTORS |= {_letter: 1024**_power, f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}
_Arguments = ParamSpec("_Arguments")
_Output = TypeVar("_Output")
# the largest size of the output that is being rendered
_largest_bytes: ContextVar[int] = ContextVar("largest_bytes", default=0)
NO_BREAK = "\u00a0"
_BLANK = re.compile(r"(?<=[0-9]) (?=(?:[KMGT]?i?B|%|[mµ]?s)(?![\w]))")
_SIZE = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([a-zA-Z]*)\s*")


def format_bytes(size_bytes: int) -> str:
    """Format a size, which may be negative: `13.15 GiB`, `2004.0 MiB`, `512 B`.

    Within an output whose largest size is in GiB (`in_one_unit`), smaller ones are, too.
    """
    return format_like(size_bytes, 0)


def unbroken(text: str, blank: str = NO_BREAK) -> str:
    """The text with another blank between numbers and their units, so that no line breaks there."""
    return _BLANK.sub(blank, text)


def format_like(size_bytes: int, other_bytes: int) -> str:
    """Format a size in the unit of a larger one in the same sentence, unless hardly a digit would be left of it."""
    magnitude = abs(size_bytes)
    in_gib = max(abs(other_bytes), _largest_bytes.get()) >= 10 * GIB
    if magnitude >= (GIB // 10 if in_gib else 10 * GIB):
        return f"{size_bytes / GIB:.2f} GiB"
    if magnitude >= MIB:
        return f"{size_bytes / MIB:.1f} MiB"
    if magnitude >= 10 * 2**10:
        return f"{size_bytes / 2**10:.1f} KiB"
    return f"{size_bytes} B"


def in_one_unit(
    largest: Callable[..., int],
) -> Callable[[Callable[_Arguments, _Output]], Callable[_Arguments, _Output]]:
    """A decorator for what renders an output: sizes are in the unit of its largest, from the arguments, in bytes."""

    def decorate(render: Callable[_Arguments, _Output]) -> Callable[_Arguments, _Output]:
        @wraps(render)
        def rendered(*positional: _Arguments.args, **named: _Arguments.kwargs) -> _Output:
            outer = _largest_bytes.set(max(_largest_bytes.get(), largest(*positional, **named)))
            try:
                return render(*positional, **named)
            finally:
                _largest_bytes.reset(outer)

        return rendered

    return decorate


def prints_as_zero(size_bytes: int) -> bool:
    """Whether a size is 0.0 in a column of MiB."""
    return abs(size_bytes) < MIB // 20


def format_mib(size_bytes: int) -> str:
    """Format a size in MiB with thousands separators, for table columns."""
    return f"{size_bytes / MIB:,.1f}"


def size_text(size_bytes: int) -> str:
    """Format a size exactly, for `parse_bytes`: `24GiB`, `500MiB`, or a number of bytes."""
    if size_bytes % GIB == 0:
        return f"{size_bytes // GIB}GiB"
    return f"{size_bytes // MIB}MiB" if size_bytes % MIB == 0 else f"{size_bytes}B"


def parse_bytes(text: str) -> int:
    """Parse `24GiB`, `23.5 GiB`, `24GB` (10**9), `24g` (2**30) or a number of bytes from 2**20; raises RecipeError."""
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    from fractions import Fraction

    # Fraction is exact: 2.3 * 10**9 is one byte short in floating point
    size_bytes = int(Fraction(match.group(1)) * factor) if match and factor else None
    if size_bytes is None or size_bytes <= 0:
        problem = "a size" if size_bytes is None else "a positive size"
        raise RecipeError(f"{text!r} is not {problem}. Write it as 24GiB, 500MiB or a number of bytes.")
    if match is not None and not match.group(2) and size_bytes < MIB:
        raise RecipeError(f"{text!r} has no unit. Write it as 24GiB or 500MiB; {text}B is a size in bytes.")
    return size_bytes
