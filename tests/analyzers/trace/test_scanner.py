import json
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ligerprof.analyzers.trace.events import trace_events
from ligerprof.errors import TraceFormatError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(), values, max_size=4),
    max_leaves=12,
)
METADATA = st.dictionaries(st.text().filter(lambda key: key != "traceEvents"), VALUES, max_size=3)


def cut(text: str, places: list[int]) -> Iterator[str]:
    borders = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return iter([text[start:end] for start, end in pairwise(borders)])


def read(*chunks: str) -> list[Any]:
    return list(trace_events("trace", iter(chunks)))


@given(
    events=st.lists(VALUES, max_size=6),
    before=METADATA,
    after=METADATA,
    style=st.sampled_from([{}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}]),
    places=st.lists(st.integers(0, 10**6), max_size=20),
)
def test_events_equal_those_of_json_wherever_the_text_is_cut(
    events: list[Any], before: dict[str, Any], after: dict[str, Any], style: dict[str, Any], places: list[int]
) -> None:
    text = json.dumps({**before, "traceEvents": events, **after}, **style)
    values = json.loads(text)

    assert list(trace_events("trace", cut(text, places))) == values["traceEvents"]
    listed = json.dumps(events, **style)
    assert list(trace_events("trace", cut(listed, places))) == values["traceEvents"]


@given(events=st.lists(VALUES, min_size=1, max_size=4), keep=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_reported_as_such(events: list[Any], keep: float) -> None:
    text = json.dumps({"a": 1, "traceEvents": events})
    with pytest.raises(TraceFormatError, match=r"truncated\?$"):
        read(text[: int(len(text) * keep)])


@pytest.mark.parametrize("number", ["0.61", "12e5", "1.5E-7", "-3.0e+12"])
def test_a_truncated_number_is_reported_as_such(number: str) -> None:
    for length in range(1, len(number)):
        with pytest.raises(TraceFormatError, match=r"truncated\?$"):
            read(f'{{"traceEvents": [{number[:length]}')


@given(text=st.text(alphabet='{}[]",:ntrue0123.eE-+ \\u"traceEvents', max_size=60))
def test_any_text_gives_events_or_a_trace_format_error(text: str) -> None:
    with suppress(TraceFormatError):
        read(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "ends within a value, after 0 characters"),
        ("# a comment", "not a trace: it begins with '#'"),
        ('{"traceEvents": {}}', "not valid JSON at character 17: expected '[', found '{'"),
        ('{"events": []}', "no 'traceEvents' key"),
        ('{"traceEvents": [{} {}]}', "expected ',' or ']', found '{'"),
        ('{"traceEvents": [{"name": nothing, "ts": 12345678}]}', "not valid JSON at character 26: Expecting value"),
        ('{1: 2, "traceEvents": []}', "a key is not a string"),
        ("[" * 100_000 + " " * 100, "values are nested too deeply"),
        ('{"traceEvents": []} {"traceEvents": []}', "not valid JSON at character 20: '{' after the end"),
        ('{"traceEvents": [' + "9" * 5000 + "]}", "an integer has thousands of digits"),
    ],
    ids=["empty", "text", "object", "no events", "no comma", "word", "key", "deep", "rest", "digits"],
)
def test_errors_name_the_problem_and_its_position(text: str, message: str) -> None:
    with pytest.raises(TraceFormatError) as raised:
        read(text)
    assert message in str(raised.value)


def test_a_long_value_is_not_decoded_anew_for_each_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    decode = json.JSONDecoder.raw_decode

    def counted(self: json.JSONDecoder, s: str, idx: int = 0) -> Any:
        decoded.append(len(s) - idx)
        return decode(self, s, idx)

    monkeypatch.setattr(json.JSONDecoder, "raw_decode", counted)
    text = json.dumps([{"name": "x" * 200_000}])
    assert read(*[text[start : start + 1000] for start in range(0, len(text), 1000)]) == json.loads(text)
    assert sum(decoded) < 4 * len(text)


def test_an_endless_value_is_refused() -> None:
    def endless() -> Iterator[str]:
        yield '[{"name": "'
        while True:
            yield "x" * 2**20

    with pytest.raises(TraceFormatError, match=r"a value is longer than 16\.0 MiB"):
        list(trace_events("trace", endless()))
