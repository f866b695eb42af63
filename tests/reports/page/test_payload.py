"""The data of a page is that of the replay, to the byte."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ligerprof.analyzers.explain.analysis import SnapshotAnalysis, analyze
from ligerprof.analyzers.explain.groups import BlockLives
from ligerprof.reports.page import payload
from ligerprof.reports.page.payload import ColumnPacker, recording_text
from ligerprof.snapshots.reader import Snapshot
from tests import recorded
from tests.reports.page.unpacking import unpack
from tests.torch_memory.allocator.programs import random_program

NAMES = (
    "hf-ckpt-4x1024",
    "small-late",
    "small-ring-3000-expandable",
    "small-oom",
    "stamped-oom",
    "small-streams",
    "small-expandable",
)


@given(st.lists(st.integers(-(2**61), 2**61)))
def test_columns_come_back_unchanged(values: list[int]) -> None:
    packer = ColumnPacker()
    packer.add(np.array([7], dtype=np.int64))
    reference = packer.add(np.array(values, dtype=np.int64))

    assert unpack(packer.to_text({"values": reference}))["values"] == values


def check(analysis: SnapshotAnalysis, lives: BlockLives | None = None) -> None:
    replayed, lives = analysis.replayed, lives or analysis.lives()
    data = unpack(recording_text(analysis, title="recording"))
    timeline, blocks = data["timeline"], data["blocks"]

    # every column shows the highest moment of its stretch, and its roles add up to it
    starts, moments = timeline["starts"], timeline["moments"]
    stops = [*starts[1:], timeline["last"] + 1]
    sums = [sum(sizes) for sizes in zip(*(role["bytes"] for role in timeline["roles"]), strict=True)]
    for start, stop, moment, held in zip(starts, stops, moments, sums, strict=True):
        assert start <= moment < stop
        assert held == replayed.allocated_bytes[moment] == replayed.allocated_bytes[start:stop].max()
    assert timeline["lowest"] == [int(replayed.allocated_bytes[a:b].min()) for a, b in zip(starts, stops, strict=True)]
    assert timeline["reserved"] == replayed.reserved_bytes[moments].tolist()

    # at any moment that is shown, the listed blocks are live and the rest of each role is not negative
    marks = [mark["moment"] for name, mark in data["marks"].items() if name != "earlier"]
    for moment in {*marks, *moments[:: max(1, len(moments) // 20)]}:
        column = moments.index(moment)
        live = [
            index
            for index, (first, events) in enumerate(zip(blocks["from"], blocks["events"], strict=True))
            if first < moment and (events < 0 or first + events >= moment)
        ]
        assert len(live) <= len(replayed.live_at(moment))
        listed: Counter[str] = Counter()
        for index in live:
            listed[data["roles"][blocks["role"][index]]] += blocks["bytes"][index]
        held_by_role = {role["name"]: role["bytes"][column] for role in timeline["roles"]}
        assert all(size <= held_by_role[role] for role, size in listed.items())
        if moment in marks or data["leastBytes"] == 0:
            assert sum(listed.values()) == int(replayed.requested_bytes[replayed.live_at(moment)].sum())
    assert data["marks"]["peak"]["bytes"] == analysis.peak.peak_bytes
    assert [state["moment"] for state in data["segments"]] == list(analysis.marked_moments)
    for state in data["segments"]:
        check_segments(analysis, lives, state)
    check_suggestions(analysis, data)


def check_segments(analysis: SnapshotAnalysis, lives: BlockLives, state: dict[str, Any]) -> None:
    """The pieces fill the segments, which add up to the reserved bytes, and the blocks in them to the allocated."""
    replayed, moment = analysis.replayed, state["moment"]
    count, rest_bytes, rest_free = state["rest"]
    assert len(state["segments"]) == len(state["lengths"])
    assert sum(state["sizes"]) + rest_bytes == replayed.reserved_bytes[moment]
    pieces = list(zip(state["sizes"], state["kinds"], strict=True))
    free = sum(size for size, kind in pieces if kind == 0)
    waiting = sum(size for size, kind in pieces if kind == 1)
    if not count:
        assert rest_free == 0
        assert free + waiting + int(replayed.allocated_bytes[moment]) == replayed.reserved_bytes[moment]
        live = set(replayed.live_at(moment).tolist())
        listed = {int(lives.blocks[kind - 3]) for _, kind in pieces if kind >= 3}
        assert listed == live & set(lives.blocks.tolist())
    for size, kind in pieces:
        assert kind < 3 or size == replayed.block_bytes[lives.blocks[kind - 3]]
    starts = [int(address, 16) for address, *_ in state["segments"]]
    assert len(set(starts)) == len(starts)


def check_suggestions(analysis: SnapshotAnalysis, data: dict[str, Any]) -> None:
    """What is drawn of a suggestion reaches exactly the peak that it promises."""
    timeline = data["timeline"]
    sums = [sum(sizes) for sizes in zip(*(role["bytes"] for role in timeline["roles"]), strict=True)]
    assert [one["name"] for one in data["whatIfs"]] == [one.name for one in analysis.suggestions]
    for one, suggestion in zip(data["whatIfs"], analysis.suggestions, strict=True):
        after = analysis.bytes_after(suggestion)
        if suggestion.new_reserved_bytes is not None:
            # it moves blocks and leaves allocated bytes as they are
            assert (after, one["lower"]) == (None, None)
            continue
        assert after is not None
        stops = [*timeline["starts"][1:], timeline["last"] + 1]
        highest = [int(after[a:b].max()) for a, b in zip(timeline["starts"], stops, strict=True)]
        assert [held - lower for held, lower in zip(sums, one["lower"], strict=True)] == highest
        assert max(highest) == one["peak"] == suggestion.new_peak_bytes
        assert (one["basis"], one["condition"]) == (suggestion.basis.value, suggestion.condition)


@pytest.mark.parametrize("name", NAMES)
def test_recordings(name: str) -> None:
    check(recorded.analysis(name))


@pytest.mark.parametrize("name", ["hf-ckpt-4x1024", "stamped-oom"])
def test_less_detail_is_exact_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "_DETAILS", ((2**17, 30_000, 200_000), (256, 40, 1000)))
    monkeypatch.setattr(payload, "_MOST_CHARACTERS", 10_000)
    analysis = recorded.analysis(name)

    check(analysis, analysis.lives(40))
    columns = len(unpack(recording_text(analysis, title="recording"))["timeline"]["starts"])
    assert columns < analysis.replayed.last_moment / 2


@pytest.mark.parametrize("seed", range(5))
def test_random_programs(seed: int) -> None:
    check(analyze(Snapshot.from_dict(random_program(seed).snapshot())))


def test_a_snapshot_without_events_has_a_page() -> None:
    """As torch writes one where the history was never switched on."""
    block = {"size": 1024, "requested_size": 1000, "state": "active_allocated", "frames": []}
    rest = {"size": 2**21 - 1024, "requested_size": 0, "state": "inactive", "frames": []}
    segment = {"address": 2**40, "total_size": 2**21, "stream": 0, "segment_type": "small", "blocks": [block, rest]}

    data = unpack(recording_text(analyze(Snapshot.from_dict({"segments": [segment]})), title="recording"))

    assert data["blocks"]["bytes"] == [1000]


def test_a_call_site_has_its_whole_stack() -> None:
    analysis = recorded.analysis("hf-ckpt-4x1024")
    data = unpack(recording_text(analysis, title="recording"))
    lengths, members = data["stacks"]
    ends = np.cumsum(lengths)
    sites = analysis.attribution.call_sites

    for index in range(0, len(analysis.lives().blocks), 97):
        stack = data["sites"][data["blocks"]["site"][index]][-1]
        frames = [data["frames"][frame] for frame in members[ends[stack] - lengths[stack] : ends[stack]]]
        calls = sites.of(int(analysis.lives().blocks[index])).stack.calls
        assert frames == [list(call) for call in calls]
