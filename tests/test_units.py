from decimal import Decimal

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ligerprof.errors import RecipeError
from ligerprof.units import GIB, MIB, format_bytes, format_like, format_mib, parse_bytes, prints_as_zero

FACTORS = {
    "": 1,
    "B": 1,
    "k": 2**10,
    "KB": 10**3,
    "KiB": 2**10,
    "M": 2**20,
    "MB": 10**6,
    "MiB": 2**20,
    "g": 2**30,
    "GB": 10**9,
    "GiB": 2**30,
    "T": 2**40,
    "TB": 10**12,
    "tib": 2**40,
}


@given(
    digits=st.integers(1, 10**12),
    decimals=st.integers(0, 6),
    unit=st.sampled_from(sorted(FACTORS)),
    blank=st.sampled_from(["", " "]),
)
def test_sizes_are_parsed_exactly(digits: int, decimals: int, unit: str, blank: str) -> None:
    number = Decimal(digits).scaleb(-decimals)
    size_bytes = digits * FACTORS[unit] // 10**decimals
    assume(unit or not 0 < size_bytes < MIB)
    text = f"{number:f}{blank}{unit}"
    if size_bytes:
        assert parse_bytes(text) == size_bytes
    else:
        with pytest.raises(RecipeError, match="positive"):
            parse_bytes(text)


@given(st.integers(1, 2**52))
def test_a_formatted_size_parses_back_to_within_its_last_digit(size_bytes: int) -> None:
    text = format_bytes(size_bytes)
    number, unit = text.split()
    last_digit = Decimal(number).as_tuple().exponent
    assert isinstance(last_digit, int)
    half_a_digit = Decimal(10) ** last_digit / 2 * FACTORS[unit]
    assert abs(parse_bytes(text) - size_bytes) <= half_a_digit + 1


@given(st.integers(0, 2**52))
def test_the_sign_is_kept(size_bytes: int) -> None:
    assert format_bytes(-size_bytes).removeprefix("-") == format_bytes(size_bytes)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (10 * 2**10, "10.0 KiB"),
        (MIB, "1.0 MiB"),
        (2004 * MIB, "2004.0 MiB"),
        (10 * GIB - MIB, "10239.0 MiB"),
        (14124071936, "13.15 GiB"),
        (-3 * MIB, "-3.0 MiB"),
    ],
)
def test_format_bytes(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


def test_columns_are_in_mib_with_thousands_separators() -> None:
    assert format_mib(13469 * MIB + MIB // 2) == "13,469.5"


@pytest.mark.parametrize(
    "text",
    ["", "plenty", "-1", "1e9", "24 GiB GiB", "24XiB", "0", "0.0GiB", "1.GiB", ".5GiB", "nan", "9" * 400, "20"],
)
def test_invalid_sizes_are_a_one_line_usage_error(text: str) -> None:
    with pytest.raises(RecipeError, match=r"Write it as 24GiB") as caught:
        parse_bytes(text)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_sizes_of_one_sentence_have_one_unit() -> None:
    assert format_like(4714 * MIB, 13 * GIB) == "4.60 GiB"
    assert format_like(12 * GIB, 9 * GIB) == "12.00 GiB"
    # hardly a digit would be left
    assert format_like(3 * MIB, 13 * GIB) == "3.0 MiB"
    assert format_like(20 * 2**10, 9 * GIB) == "20.0 KiB"
    assert (prints_as_zero(MIB // 20 - 1), prints_as_zero(-(MIB // 20))) == (True, False)
