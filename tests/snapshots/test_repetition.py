"""Repeated events give the same replay whether or not the repetition is used."""

import random
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ligerprof.snapshots import repetition as module
from ligerprof.snapshots import replay as replaying
from ligerprof.snapshots.events import ACTIONS, EventColumns
from ligerprof.snapshots.reader import Snapshot, read_snapshot
from ligerprof.snapshots.repetition import Repetition, find_repetition
from ligerprof.snapshots.replay import Replay, replay
from ligerprof.snapshots.trace import DeviceTrace
from tests.paths import RECORDINGS
from tests.torch_memory.allocator.programs import random_program

BASE = 2**40


@pytest.fixture(autouse=True)
def _short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WINDOW", 8)
    monkeypatch.setattr(module, "_LEAST_EVENTS", 20)


def in_full(snapshot: Snapshot) -> Replay:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replaying, "find_repetition", lambda columns: None)
        return replay(snapshot, 0)


def assert_equal(left: Replay, right: Replay) -> None:
    for field in fields(Replay):
        values = getattr(left, field.name), getattr(right, field.name)
        if isinstance(values[0], np.ndarray):
            assert np.array_equal(*values), field.name
        elif not isinstance(values[0], DeviceTrace):
            assert values[0] == values[1], field.name


def damaged(events: list[dict[str, Any]], draw: random.Random) -> Iterator[dict[str, Any]]:
    """The events with a few of them left out, doubled or moved to another address."""
    for event in events:
        for _ in range(draw.choice([1] * 18 + [0, 2])):
            moved = draw.choice([0] * 18 + [512, 2**21])
            yield {**event, "addr": event["addr"] + moved}


def with_stacks(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The events as recorded with context="alloc": those that free a block repeat the stack of its allocation."""
    owners: dict[int, list[str]] = {}
    for number, event in enumerate(events):
        if event["action"] == "alloc" or event["addr"] not in owners:
            owners[event["addr"]] = [f"stack {number}"]
        yield {**event, "frames": list(owners[event["addr"]])}


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    expandable=st.booleans(),
    count=st.integers(4, 14),
    is_damaged=st.booleans(),
    has_stacks=st.booleans(),
)
def test_a_repetition_gives_what_the_whole_trace_gives(
    seed: int, expandable: bool, count: int, is_damaged: bool, has_stacks: bool
) -> None:
    draw = random.Random(seed)
    program = random_program(seed, events=80, expandable=expandable)
    values, events = program.snapshot(), program.events
    first, last = sorted(draw.sample(range(len(events) + 1), 2))
    turn = list(damaged(events[first:last], draw) if is_damaged else events[first:last])
    trace = [*events[:first], *turn * count, *events[last:]]
    if has_stacks:
        trace = list(with_stacks(trace))
    trace = trace[draw.choice([0, 0, draw.randrange(len(trace))]) :]
    snapshot = Snapshot.from_dict({**values, "device_traces": [trace]})

    assert_equal(replay(snapshot, 0), in_full(snapshot))


@settings(max_examples=150, deadline=None)
@given(draw=st.randoms(use_true_random=False))
def test_events_that_do_not_fit_give_what_the_whole_trace_gives(draw: random.Random) -> None:
    """Any events in any order, also a release whose two events are in two turns."""
    actions = draw.choice([ACTIONS[:3] * 5 + ACTIONS, ACTIONS[:3] * 3 + ACTIONS[:5], ACTIONS[:3]])
    addresses = [BASE + 512 * index for index in range(draw.choice([2, 4, 8]))] + [BASE + 2**21]

    def some(count: int) -> list[dict[str, Any]]:
        events = []
        for _ in range(count):
            size = draw.choice([512, 1024, 2048, 2**20 + 512, 2**21])
            events.append({"action": draw.choice(actions), "addr": draw.choice(addresses), "size": size})
            if events[-1]["action"] == "free_requested" and draw.random() < 0.6:
                events.append({**events[-1], "action": "free_completed"})
        return events

    turn = some(draw.randrange(5, 20))
    cut = draw.randrange(len(turn))
    trace = some(draw.randrange(6)) + (turn[cut:] + turn[:cut]) * draw.randrange(5, 12) + some(draw.randrange(6))
    states = ["active_allocated", "inactive", "active_pending_free"]
    segments = [
        {
            "address": address,
            "total_size": 2048,
            "is_expandable": draw.random() < 0.5,
            "blocks": [{"size": 512, "requested_size": 500, "state": draw.choice(states)} for _ in range(4)],
        }
        for address in draw.sample([BASE, BASE + 2**22, BASE + 2**23], draw.randrange(3))
    ]
    snapshot = Snapshot.from_dict({"segments": segments, "device_traces": [trace]})

    assert_equal(replay(snapshot, 0), in_full(snapshot))


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), before=st.integers(0, 40), period=st.integers(9, 60), after=st.integers(0, 35))
def test_the_repetition_around_the_middle_is_found(seed: int, before: int, period: int, after: int) -> None:
    draw = random.Random(seed)
    numbers = [np.array([draw.randrange(2**40) for _ in range(length)]) for length in (before, period, after)]
    column = np.concatenate([numbers[0], np.tile(numbers[1], 8), numbers[2]]).astype(np.int64)
    columns = EventColumns(actions=column % 7, addresses=column, sizes=column // 3)

    assert find_repetition(columns) == Repetition(start=before, period=period, count=8)


@pytest.mark.parametrize("name", ["hf-nockpt-8x1024", "small-ring-3000-expandable", "small-streams", "small-oom"])
@pytest.mark.parametrize("cut", [0, 700])
def test_recordings_repeated_as_they_are(name: str, cut: int) -> None:
    recorded = read_snapshot(RECORDINGS / f"{name}.pickle.xz")
    events = list(recorded.trace_of(0))[:3000]
    snapshot = Snapshot(
        source="repeated",
        segments=recorded.segments,
        device_traces=[(events * 6)[cut : len(events) * 6 - cut]],
        settings=recorded.settings,
    )

    assert find_repetition(EventColumns.of(snapshot.trace_of(0), "")) is not None
    assert_equal(replay(snapshot, 0), in_full(snapshot))
