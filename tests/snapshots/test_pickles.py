"""Events read as tables from a pickle's bytes equal those that pickle loads; in doubt, there are only dicts."""

import lzma
import pickle
import random
import re
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ligerprof.errors import SnapshotFormatError
from ligerprof.snapshots import event_tables
from ligerprof.snapshots.pickles import load_snapshot_data
from ligerprof.snapshots.trace import DeviceTrace
from tests.paths import RECORDINGS

RECORDED = ("small-streams", "small-own-all", "small-zero2", "small-two-devices", "stamped-oom")
KEYS = ("action", "addr", "size", "stream", "time_us", "user_metadata", "frames")


def load(pickled: bytes, *, fast: bool = True) -> Any:
    return load_snapshot_data(lambda: np.frombuffer(bytearray(pickled), dtype=np.uint8), fast=fast)


def in_tables(values: Any) -> int:
    traces = values["device_traces"]
    return sum(int(np.count_nonzero(trace._rows >= 0)) for trace in traces if isinstance(trace, DeviceTrace))


def read_in_pieces(patch: pytest.MonkeyPatch) -> None:
    """Read small files as large ones are read: in several pieces."""
    patch.setattr(event_tables, "_BYTES_AT_ONCE", 2**9)


@pytest.mark.parametrize("name", RECORDED)
def test_recordings_are_read_unchanged_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pickled = lzma.decompress((RECORDINGS / f"{name}.pickle.xz").read_bytes())
    read_in_pieces(monkeypatch)

    values = load(pickled)

    assert values == pickle.loads(pickled)
    assert in_tables(values) > 0.9 * sum(map(len, values["device_traces"]))


@pytest.mark.parametrize("protocol", [None, 2, 3, 4, 5])
@pytest.mark.parametrize("name", RECORDED)
def test_recordings_are_read_unchanged_and_almost_entirely_from_bytes(name: str, protocol: int | None) -> None:
    pickled = lzma.decompress((RECORDINGS / f"{name}.pickle.xz").read_bytes())
    expected = pickle.loads(pickled)
    if protocol is not None:
        pickled = pickle.dumps(expected, protocol)

    values = load(pickled)

    assert values == expected
    assert in_tables(values) > 0.9 * sum(map(len, expected["device_traces"]))


small_numbers = (0, 1, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**40, 2**55, 2**63, 2**64 - 1, -1, -(2**40))
numbers = st.sampled_from(small_numbers)
texts = st.sampled_from(["", "N/A", "a" * 70, "é" * 200, pickle.dumps([{"action": "b", "addr": 5}]).decode("latin-1")])
shared_frames = [[], [{"name": "f", "filename": "g", "line": 3}], [{"name": "h", "filename": "", "line": 0}] * 3]
pairs = st.tuples(*[st.sampled_from([0, 1, 256, 65536, -1])] * 2)
values_of = st.one_of(numbers, texts, st.none(), st.booleans(), pairs)
frames_of = st.one_of(st.sampled_from(shared_frames), st.sampled_from(shared_frames).map(list), values_of)


@st.composite
def events(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Events that repeat a few patterns with some values changed; some events are the same object."""
    order = draw(st.permutations(KEYS[1:]))
    stated = {key: frames_of if key == "frames" else values_of for key in order}
    patterns = draw(
        st.lists(
            st.fixed_dictionaries({"action": st.sampled_from(["alloc", "oom", 5]), **stated}), min_size=1, max_size=4
        )
    )
    made: list[dict[str, Any]] = []
    for index in draw(st.lists(st.integers(0, len(patterns)), max_size=60)):
        if index == len(patterns):
            made.extend(made[-1:])
            continue
        event = dict(patterns[index])
        if draw(st.booleans()):
            event[draw(st.sampled_from(KEYS))] = draw(values_of)
        if draw(st.integers(0, 5)) == 0:
            del event[draw(st.sampled_from(KEYS))]
        if draw(st.booleans()) and isinstance(event.get("frames"), list):
            event["frames"] = list(event["frames"])
        made.append(event)
    return made


@settings(max_examples=150, deadline=None)
@given(st.lists(events(), max_size=3), st.sampled_from([2, 3, 4, 5]), st.booleans(), st.booleans())
def test_any_events_are_read_as_pickle_loads_them(
    traces: list[list[dict[str, Any]]], protocol: int, first: bool, in_threads: bool
) -> None:
    others = {"segments": [{"frames": trace[0].get("frames")} for trace in traces if trace]}
    whole = {"device_traces": traces, **others} if first else {**others, "device_traces": traces}

    with pytest.MonkeyPatch.context() as patch:
        if in_threads:
            read_in_pieces(patch)

        values = load(pickle.dumps(whole, protocol))

    assert values == whole
    for trace, plain in zip(values["device_traces"], traces, strict=True):
        if isinstance(trace, DeviceTrace):
            require_columns_of(trace, plain)


def require_columns_of(trace: DeviceTrace, plain: list[dict[str, Any]]) -> None:
    for key in KEYS:
        codes, found = trace.objects(key)
        assert [found[code] for code in codes.tolist()] == [event.get(key) for event in plain]
        assert np.array_equal(trace.numbers(key), DeviceTrace(plain).numbers(key))


def test_equal_stacks_share_a_table_entry_and_stay_complete_elsewhere() -> None:
    frames = [{"name": str(line), "filename": "f.py", "line": line} for line in range(9)]
    own = [list(frames) for _ in range(50)]
    trace = [{"action": "alloc", "addr": index, "frames": stack} for index, stack in enumerate(own)]
    whole = {"device_traces": [trace], "segments": [{"frames": stack} for stack in own]}

    values = load(pickle.dumps(whole))

    assert values == whole
    assert isinstance(values["device_traces"][0], DeviceTrace)
    codes, stacks = values["device_traces"][0].objects("frames")
    assert len(stacks) < 6
    assert all(stacks[code] == frames for code in codes.tolist())


def without_frames(values: Any) -> list[list[dict[str, Any]]]:
    """The events without their stacks, since damage can make a stack refer to events or to the list of all events."""
    return [
        [{key: value for key, value in event.items() if key != "frames"} for event in trace]
        for trace in values["device_traces"]
    ]


@pytest.mark.parametrize("protocol", [2, 4])
def test_damaged_bytes_are_read_as_pickle_loads_them_or_refused(protocol: int) -> None:
    """Before protocol 4, damage can overwrite a memo index, which events that are cut do not; such files may differ."""
    whole = pickle.loads(lzma.decompress((RECORDINGS / "small-own-all.pickle.xz").read_bytes()))
    whole["device_traces"][0] = whole["device_traces"][0][:500]
    pickled = pickle.dumps({"segments": whole["segments"][:2], "device_traces": whole["device_traces"]}, protocol)
    draw = random.Random(protocol)
    read = 0
    for _ in range(150):
        damaged = bytearray(pickled)
        for _ in range(draw.choice([1, 1, 3])):
            damaged[draw.randrange(2, len(damaged))] = draw.randrange(256)
        try:
            values, expected = load(bytes(damaged)), load(bytes(damaged), fast=False)
        except SnapshotFormatError:
            continue
        if not in_tables(values):
            continue
        read += 1
        assert without_frames(values) == without_frames(expected) or protocol < 4
    assert read > 15


@pytest.mark.parametrize("traces_first", [True, False])
@pytest.mark.parametrize("in_threads", [True, False])
def test_a_changed_byte_of_an_event_is_read_as_pickle_loads_it_or_refused(
    traces_first: bool, in_threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """References to later objects, to other events and to nothing; in events, their stacks and their keys."""
    if in_threads:
        read_in_pieces(monkeypatch)
    stacks = [[{"name": f"f{line}", "filename": "a.py", "line": line}] * 2 for line in range(4)]
    made = [
        {"action": "alloc" if index % 3 else "free_completed", "addr": 512 * index, "frames": stacks[index // 8]}
        for index in range(32)
    ]
    trace = [event | {"frames": list(event["frames"])} if index % 2 else event for index, event in enumerate(made)]
    parts = {"device_traces": [trace], "segments": [{"frames": stacks[0], "state": "inactive"}]}
    whole = parts if traces_first else dict(reversed(parts.items()))
    pickled = pickle.dumps(whole, 4)
    heads = [match.start() for match in re.finditer(rb"\}\x94\(", pickled)]
    silent, refused, equal = [], 0, 0
    for at in range(heads[len(heads) // 2 - 3], heads[len(heads) // 2 + 3]):
        for byte in {pickled[at] ^ 1, (pickled[at] + 9) % 256, (pickled[at] - 5) % 256, heads[at % 9] % 256}:
            damaged = pickled[:at] + bytes([byte]) + pickled[at + 1 :]
            expected, values = (loaded(damaged, fast=fast) for fast in (False, True))
            refused += expected is None
            if "..." in repr(expected):
                # values that contain themselves cannot be compared
                continue
            equal += values is not None and values == expected
            if values is not None and values != expected:
                silent.append((at, byte))
    assert not silent
    assert refused > 100
    assert equal > 100


def loaded(pickled: bytes, *, fast: bool) -> Any:
    """The values, or None if they are refused."""
    try:
        return load(pickled, fast=fast)
    except SnapshotFormatError:
        return None


@pytest.mark.parametrize(("early", "expected"), [(b"K\x01K\x02\x86.", (1, 2)), (b"}.", {}), (b"].", [])])
def test_events_after_the_end_of_a_pickle_are_not_read(early: bytes, expected: object) -> None:
    events = pickle.dumps([{"action": "alloc", "addr": index} for index in range(50)], 2)[2:]

    assert load(b"\x80\x02" + early + events) == expected


def test_long_texts_take_no_memory_per_byte_but_their_own() -> None:
    def event(number: int) -> dict[str, Any]:
        frames = [{"filename": "f" * 9_000 + str(number), "name": "g" * 9_000, "line": 1}]
        return {"action": "alloc", "addr": 512 * number, "size": 512, "stream": 0, "time_us": number, "frames": frames}

    values = {"segments": [], "device_traces": [[event(number) for number in range(300)]]}
    pickled = pickle.dumps(values, 4)

    tracemalloc.start()
    loaded = load(pickled)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert loaded == values
    assert in_tables(loaded) > 200
    assert peak_bytes < 6 * len(pickled)
