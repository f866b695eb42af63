"""Events as table rows give what the events as dicts give."""

import random
from typing import Any

import numpy as np
import pytest

from ligerprof.snapshots import trace as module
from ligerprof.snapshots.trace import DeviceTrace
from tests.snapshots.mutations import STRANGE

KEYS = ("action", "addr", "size", "frames", "user_metadata")


@pytest.mark.parametrize("seed", range(8))
def test_columns_of_any_events_give_what_the_dicts_give(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LEAST_ROWS", 10)
    draw = random.Random(seed)
    lists: list[Any] = [[{"name": "f"}], [], [{"name": "g"}]]
    events: list[dict[Any, Any]] = []
    for number in range(draw.choice([10, 120, 300])):
        event: dict[Any, Any] = {"action": "alloc", "addr": 512 * number, "size": draw.randrange(9)}
        event |= {"frames": draw.choice(lists)} if draw.random() < 0.95 else {}
        if draw.random() < 0.1 * (seed % 3):
            event[draw.choice([*KEYS, 5, "x"])] = draw.choice(STRANGE)()
        events.append(event)
    plain, columns = DeviceTrace(list(events)), DeviceTrace.in_columns(list(events))

    assert repr(list(columns)) == repr(events)
    for key in (*KEYS, "missing"):
        assert np.array_equal(columns.numbers(key), plain.numbers(key)), key
        (here, found), (there, expected) = columns.objects(key), plain.objects(key)
        assert [repr(found[index]) for index in here] == [repr(expected[index]) for index in there], key
    shared = [index for index, event in enumerate(events) if event.get("frames") is lists[0]]
    assert len(set(columns.objects("frames")[0][shared].tolist())) == 1
    assert repr(list(columns[3:9])) == repr(events[3:9])
