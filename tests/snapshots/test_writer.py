import pickle
from typing import Any

import numpy as np
import pytest
from torch.cuda import _memory_viz

from ligerprof.snapshots.pickles import load_snapshot_data
from ligerprof.snapshots.reader import read_snapshot
from ligerprof.snapshots.writer import EventContext, TraceEvent, build_snapshot
from ligerprof.torch_memory.allocator.caching import CachingAllocator
from ligerprof.torch_memory.allocator.settings import AllocatorSettings, parse_allocator_settings
from tests.paths import RECORDINGS

RECORDING = RECORDINGS / "hf-ckpt-4x1024.pickle.xz"
FRAME = {"name": "forward", "filename": "model.py", "line": 7}


def written(configuration: AllocatorSettings, limit_bytes: int | None = None) -> dict[str, Any]:
    events: list[TraceEvent] = []
    here = EventContext("stamp", [FRAME])

    def keep(action: str, address: int, size_bytes: int, context: object) -> None:
        assert isinstance(context, EventContext)
        events.append(TraceEvent(action, address, size_bytes, context))

    allocator = CachingAllocator(settings=configuration, limit_bytes=limit_bytes, observe=keep)
    kept = [allocator.malloc(size, here) for size in (100, 3_000_000, 50_000_000)]
    allocator.free(kept[1], EventContext("later"))
    if limit_bytes is not None:
        with pytest.raises(Exception, match="out of memory"):
            allocator.malloc(limit_bytes, here)
    return build_snapshot(allocator, events, configuration)


@pytest.mark.parametrize("text", ["", "expandable_segments:True"])
def test_keys_are_those_that_torch_writes(text: str) -> None:
    ours, real = written(parse_allocator_settings(text)), read_snapshot(RECORDING)

    assert set(ours) == {"segments", "device_traces", "allocator_settings", "external_annotations"}
    assert set(ours["allocator_settings"]) == set(real.settings)
    for key in ("device_traces", "segments"):
        mine = ours[key][0][0] if key == "device_traces" else ours[key][0]
        theirs = real.trace_of(0)[0] if key == "device_traces" else real.segments[0]
        assert set(mine) == set(theirs)
    assert set(ours["segments"][0]["blocks"][0]) == set(real.segments[0]["blocks"][0])


def test_events_carry_their_stamp_and_frames() -> None:
    trace = written(AllocatorSettings())["device_traces"][0]
    allocated = [event for event in trace if event["action"] == "alloc"]
    freed = [event for event in trace if event["action"] == "free_completed"]
    assert [event["user_metadata"] for event in allocated] == ["stamp"] * 3
    assert allocated[0]["frames"] == [FRAME]
    assert freed[0]["user_metadata"] == "later"
    assert [event["time_us"] for event in trace] == sorted({event["time_us"] for event in trace})


def test_out_of_memory_event_has_the_free_device_memory() -> None:
    event = written(AllocatorSettings(), limit_bytes=100_000_000)["device_traces"][0][-1]
    assert event["action"] == "oom"
    assert "addr" not in event
    assert 0 <= event["device_free"] < 100_000_000


@pytest.mark.parametrize("text", ["", "expandable_segments:True"])
def test_torchs_own_viewer_reads_the_file(text: str) -> None:
    snapshot = written(parse_allocator_settings(text))
    assert "[0:100.0B]" in _memory_viz.trace(snapshot)
    assert "allocated" in _memory_viz.segsum(snapshot)
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "<html" in plot(snapshot)


def test_the_file_contains_only_plain_data() -> None:
    snapshot = written(AllocatorSettings())
    pickled = pickle.dumps(snapshot, protocol=4)
    assert load_snapshot_data(lambda: np.frombuffer(bytearray(pickled), dtype=np.uint8)) == snapshot
