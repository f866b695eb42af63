"""Text that comes from files, made safe for terminals and for one-line messages; the text of printed results."""

import reprlib
from collections.abc import Callable
from typing import Any, ClassVar

_MOST_CHARACTERS = 60
# such numbers fit 64 bits, and int() raises beyond a few thousand digits
_MOST_DIGITS = 18
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 3
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = _MOST_CHARACTERS


class Printed:
    """Results that print as their command prints them.

    Attributes:
        reports: returns the module that renders them; `ligerprof/__init__.py` sets it, as reports know the results.
    """

    __slots__ = ()
    reports: ClassVar[Callable[[], Any]]

    def __str__(self) -> str:
        text: str = Printed.reports().as_text(self)
        return text

    def _repr_html_(self) -> str:
        element: str = Printed.reports().as_html(self)
        return element

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": str(self)}


def printable(text: str, *, keep: str = "") -> str:
    r"""Escape the characters that a terminal obeys or hides, as `repr` writes them.

    These are control characters, line breaks, marks of direction, invisible spaces, and lone surrogates, which cannot
    be encoded. `\x1b` becomes four characters.

    Args:
        keep: characters to leave as they are, such as a line break.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in keep else each.encode("unicode_escape").decode("ascii") for each in text
    )


def error_line(error: BaseException, most: int | None = None) -> str:
    """An exception's type and message in one line, of at most this many characters."""
    return printable(" ".join(f"{type(error).__name__}: {error}".split()))[:most]


def whole_number(text: str) -> int | None:
    """The number that a text of decimal digits means; None for any other text and beyond 18 digits."""
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else None


def short_repr(value: object) -> str:
    """A short `repr`, in bounded time even for lists that share items or contain themselves, and for long integers."""
    if isinstance(value, int) and value.bit_length() > 4 * _MOST_CHARACTERS:
        return f"an integer of {value.bit_length()} bits"
    return printable(_SHORT.repr(value))[:_MOST_CHARACTERS]
