import gzip
import lzma
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ligerprof.analyzers.explain.analysis import explain
from ligerprof.errors import LigerprofError, SnapshotFormatError
from ligerprof.snapshots.pickles import load_snapshot_data
from ligerprof.snapshots.reader import Snapshot, read_snapshot
from ligerprof.units import MIB
from tests.paths import RECORDINGS
from tests.torch_memory.allocator.programs import random_program

EVENTS = {
    "hf-ckpt-4x1024": 15653,
    "liger-flce-ckpt-4x1024": 16283,
    "hf-nockpt-8x1024": 12711,
    "hf-4.45-ckpt-4x1024": 16769,
    "zero3-offload-4x1024": 38341,
}
PROTOCOL_4 = b"\x80\x04"


def load(pickled: bytes) -> Any:
    return load_snapshot_data(lambda: np.frombuffer(bytearray(pickled), dtype=np.uint8), fast=False)


def small_values() -> dict[str, Any]:
    values = random_program(11, events=40).snapshot()
    stack = [
        {"name": "forward", "filename": "modeling.py", "line": 70000},
        {"name": "é" * 200, "filename": "", "line": 0},
    ]
    for index, event in enumerate(values["device_traces"][0]):
        event.update(frames=stack[index % 2 :], time_us=2**50 + index, user_metadata="", pool_id=(0, index))
    values["allocator_settings"]["garbage_collection_threshold"] = 0.5
    return values


@pytest.mark.parametrize("name", sorted(EVENTS))
def test_reads_recordings_unchanged(name: str) -> None:
    path = RECORDINGS / f"{name}.pickle.xz"

    snapshot = read_snapshot(path)

    raw = pickle.loads(lzma.decompress(path.read_bytes()))
    assert len(snapshot.trace_of(0)) == EVENTS[name]
    assert snapshot.device_traces == raw["device_traces"]
    assert snapshot.segments == raw["segments"]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress], ids=["plain", "gzip", "xz"])
def test_reads_every_protocol_and_compression_under_any_name(protocol: int, pack: Any, tmp_path: Path) -> None:
    values = small_values()
    path = tmp_path / "snapshot.txt"
    path.write_bytes(pack(pickle.dumps(values, protocol)))

    snapshot = read_snapshot(path)

    assert snapshot.device_traces == values["device_traces"]
    assert snapshot.settings == values["allocator_settings"]


@pytest.mark.parametrize(
    "content",
    [b"", b"PK\x03\x04 a zip file", b"(dp0\n.", b"\x80\x63}.", b"\x80", b"\x80\x04", b"\x80\x04."],
    ids=["empty", "zip", "protocol 0", "protocol of the future", "one byte", "start alone", "nothing on the stack"],
)
def test_files_that_are_not_snapshots_give_one_line(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(content)

    with pytest.raises(SnapshotFormatError) as raised:
        read_snapshot(path)

    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", ["gzip", "xz"])
def test_decompression_bomb_is_refused_early(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    bomb = PROTOCOL_4 + b"N" * (80 * 2**20)
    path.write_bytes(gzip.compress(bomb) if kind == "gzip" else lzma.compress(bomb, preset=0))

    with pytest.raises(SnapshotFormatError, match="No recording compresses that well"):
        read_snapshot(path)


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress], ids=["plain", "gzip", "xz"])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.7, 0.999])
def test_truncated_file_is_reported(pack: Any, share: float, tmp_path: Path) -> None:
    whole = pack(pickle.dumps(small_values()))
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(whole[: 10 + int(share * (len(whole) - 11))])

    with pytest.raises(SnapshotFormatError, match=r"cut short|damaged|not a pickle"):
        read_snapshot(path)


@pytest.mark.parametrize(
    "values",
    [None, [], [5], "text", {}, {"segments": 5}, {"device_traces": [[1]]}, {"device_traces": {}}, {"segments": [[]]}],
)
def test_other_data_is_refused_in_one_line(values: Any) -> None:
    with pytest.raises(SnapshotFormatError):
        Snapshot.from_dict(load(pickle.dumps(values)))


def test_unreadable_path_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SnapshotFormatError, match="cannot be read"):
        read_snapshot(tmp_path / "missing.pickle")


def test_devices_are_those_with_events_or_segments() -> None:
    values = {"device_traces": [[], [{"action": "snapshot"}]], "segments": [{"device": 3}]}

    assert Snapshot.from_dict(values).devices == (1, 3)


def newer_torch(values: dict[str, Any]) -> dict[str, Any]:
    """A snapshot with what torch 2.13 and later write in addition, and an action from the future."""
    changed: dict[str, Any] = pickle.loads(pickle.dumps(values))
    events: list[dict[str, Any]] = []
    for index, event in enumerate(changed["device_traces"][0]):
        events.append({**event, "pool_id": (0, 0), "forward_frames": ["  File x.py\n"], "compile_context": "0/0"})
        if event["action"] == "alloc":
            label = {
                "action": "annotate",
                "addr": event["addr"],
                "size": 0,
                "user_metadata": {"name": "w"},
                "frames": [],
            }
            events.append({**label, "stream": 0, "time_us": event["time_us"], "pool_id": (0, 0)})
        if index % 1000 == 0:
            events += [{"action": "snapshot", "addr": 0, "size": 0}, {"action": "defragment", "addr": 5, "size": 3}]
    frames = {id(frame): frame for event in events for frame in event.get("frames", ())}
    for frame in frames.values():
        frame.update(fx_node_op="call_function", fx_node_name="mm", fx_original_trace="x", fx_node_info={"a": [1]})
    settings = {**changed["allocator_settings"], "trace_alloc_overflowed": True, "trace_alloc_max_entries": [900, 901]}
    return {**changed, "device_traces": [events, None], "allocator_settings": settings, "generation": 3}


def test_what_newer_versions_of_torch_add_changes_nothing(tmp_path: Path) -> None:
    packed = (RECORDINGS / "small-liger-all.pickle.xz").read_bytes()
    path = tmp_path / "newer.pickle"
    path.write_bytes(pickle.dumps(newer_torch(pickle.loads(lzma.decompress(packed)))))

    expected, report = explain(RECORDINGS / "small-liger-all.pickle.xz"), explain(path)

    assert report.peak_bytes == expected.peak_bytes
    assert report.roles == expected.roles
    assert report.complete
    assert report.notes == (
        "3 events have actions that this version does not know ('defragment') and leaves out",
        "torch's buffer of 900 events overflowed: the oldest events are lost",
    )


def test_segments_alone_are_the_memory_at_the_time() -> None:
    """They are what torch.cuda.memory_snapshot() returns."""
    values = random_program(11, events=40).snapshot()
    blocks = [block for segment in values["segments"] for block in segment["blocks"]]
    held = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
    for source in (Snapshot.from_dict(values["segments"]), Snapshot.from_dict({"segments": values["segments"]})):
        report = explain(source)
        assert report.peak_bytes == held
        assert "no events" in report.notes[0]


def test_events_alone_are_replayed_with_a_note() -> None:
    values = random_program(11, events=40).snapshot()
    report = explain(Snapshot.from_dict({"device_traces": values["device_traces"]}))
    assert report.peak_bytes == explain(Snapshot.from_dict(values)).peak_bytes
    assert report.notes[0] == "the file has no segments that the replay could be checked against"


@pytest.mark.parametrize("protocol", [2, 4])
def test_damaged_bytes_give_data_or_one_error(protocol: int) -> None:
    whole = pickle.dumps(small_values(), protocol)
    draw = random.Random(protocol)
    messages = []
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(draw.choice([1, 1, 2, 8])):
            damaged[draw.randrange(2, len(damaged))] = draw.randrange(256)
        try:
            load(bytes(damaged))
        except LigerprofError as error:
            messages.append(str(error))
    assert messages
    assert not any("\n" in message for message in messages)


def pinned_values(**changes: Any) -> dict[str, Any]:
    """As torch 2.14 writes them: blocks are powers of two, and the first events may be lost."""
    stack = [{"name": "store", "filename": "/home/a/offload.py", "line": 12}]
    block = {"segment_pool_id": (0, 0), "frames": stack}
    values = small_values()
    values["host_segments"] = [
        {"address": 1 << 40, "total_size": 4 * MIB, "state": "active_allocated", **block},
        {"address": 2 << 40, "total_size": 2 * MIB, "state": "inactive", **block},
        {"address": 3 << 40, "total_size": MIB, "state": "active_pending_free", **block},
    ]
    events = (("segment_free", 8), ("segment_alloc", 1), ("alloc", 1), ("free_requested", 1), ("segment_free", 16))
    values["host_traces"] = [
        {"action": action, "addr": 9 << 40, "size": size * MIB, "stream": 0, "time_us": 1} for action, size in events
    ]
    return {**values, **changes}


@pytest.mark.parametrize("listed", [False, True], ids=["one list", "a list per allocator"])
def test_page_locked_memory_is_read(listed: bool, tmp_path: Path) -> None:
    values = pinned_values()
    if listed:
        values["host_traces"] = [values["host_traces"]]
    (tmp_path / "snapshot.pickle").write_bytes(pickle.dumps(values))

    snapshot = read_snapshot(tmp_path / "snapshot.pickle")

    assert snapshot.pinned is not None
    assert (snapshot.pinned.held_bytes, snapshot.pinned.used_bytes) == (7 * MIB, 5 * MIB)
    # before the last event there were 7 and 16 MiB, at the beginning one MiB less and 8 more
    assert snapshot.pinned.peak_bytes == 30 * MIB
    notes = explain(snapshot).notes
    assert any("7.0 MiB in 3 blocks" in note and "offload.py:12; 30.0 MiB at most" in note for note in notes)


@pytest.mark.parametrize(
    "changes",
    [
        {"host_segments": [None, {}, {"total_size": "much"}, {"size": MIB, "frames": 3, "blocks": [None]}]},
        {"host_traces": [None, [3], {"action": [], "size": -1}]},
        {"host_traces": "none"},
    ],
)
def test_page_locked_memory_in_another_shape_does_not_stop_the_reader(changes: dict[str, Any]) -> None:
    pinned = Snapshot.from_dict(pinned_values(**changes)).pinned
    assert pinned is not None
    assert pinned.held_bytes in (MIB, 7 * MIB)


def test_page_locked_memory_is_none_if_it_was_not_recorded() -> None:
    assert Snapshot.from_dict(pinned_values(host_segments=None)).pinned is None
    assert Snapshot.from_dict(small_values()).pinned is None
