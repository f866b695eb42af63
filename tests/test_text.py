"""Text from files is shown escaped, and in bounded time."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ligerprof.text import printable, short_repr, whole_number


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("modeling_llama.py:92 forward", "modeling_llama.py:92 forward"),
        ("é \N{CJK UNIFIED IDEOGRAPH-4E2D}", "é \N{CJK UNIFIED IDEOGRAPH-4E2D}"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\x9b31m", r"\x9b31m"),
        ("a\nb\r\t", r"a\nb\r\t"),
        ("a\u202eb\u2066\u200b", r"a\u202eb\u2066\u200b"),
        ("\ud800", r"\ud800"),
    ],
)
def test_what_a_terminal_obeys_or_hides_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text(st.characters(exclude_categories=())))
def test_any_text_becomes_one_line_that_can_be_encoded(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert shown.encode("utf-8").decode("utf-8") == shown
    assert len(printable(text, keep="\n").split("\n")) == text.count("\n") + 1


def test_values_of_any_depth_and_size_have_a_short_repr() -> None:
    shared: list[object] = []
    for _ in range(60):
        shared = [shared, shared]
    deep: list[object] = []
    for _ in range(10 * sys.getrecursionlimit()):
        deep = [deep]
    endless: list[object] = []
    endless.append(endless)
    values = (shared, deep, endless, {"a": shared}, "\x1b" * 10**6, 10**5000, -(10**5000), list(range(10**6)), 1.5)
    for value in values:
        assert len(short_repr(value)) <= 60
        assert short_repr(value).isprintable()
    assert short_repr(10**5000) == "an integer of 16610 bits"
    assert short_repr(-7) == "-7"


@pytest.mark.parametrize(("text", "number"), [("12", 12), ("-1", None), ("", None), ("x", None), ("9" * 19, None)])
def test_whole_numbers_have_few_digits(text: str, number: int | None) -> None:
    assert whole_number(text) == number
    assert whole_number("9" * 5000) is None
