import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ligerprof.analyzers.explain.analysis import explain
from ligerprof.analyzers.explain.groups import BlockGroup
from ligerprof.analyzers.explain.peak import PeakDiff, PeakReport, diff_peaks
from ligerprof.roles import MemoryBreakdown, Phase, Role
from ligerprof.snapshots.reader import Snapshot, read_snapshot
from tests import recorded
from tests.paths import RECORDINGS
from tests.sampling import sampled

MIB = 2**20


def recording(name: str) -> Path:
    return RECORDINGS / f"{name}.pickle.xz"


def group(
    size_bytes: int,
    module: str = "",
    frame: str = "",
    *,
    role: Role = Role.ACTIVATIONS,
    layer: int | None = None,
    count: int = 1,
) -> BlockGroup:
    return BlockGroup(
        role=role,
        size_bytes=size_bytes,
        count=count,
        module=module,
        frame=frame,
        phase=Phase.FORWARD,
        layers=() if layer is None else (layer,),
    )


def report(*blocks: BlockGroup, rounding: int = 0) -> PeakReport:
    roles = dict.fromkeys(Role, 0)
    roles[Role.ALLOCATOR_ROUNDING] = rounding
    for block in blocks:
        roles[block.role] += block.size_bytes
    breakdown = MemoryBreakdown(roles=roles)
    return PeakReport(
        device=0,
        peak_bytes=breakdown.total_bytes,
        reserved_bytes=breakdown.total_bytes,
        complete=True,
        roles=breakdown,
        blocks=blocks,
    )


def add_up(diff: PeakDiff) -> None:
    """All sums must agree, from blocks to roles to peaks."""
    for role in Role:
        groups = [change for change in diff.groups if change.place.role is role]
        if role is not Role.ALLOCATOR_ROUNDING:
            assert sum(change.before_bytes for change in groups) == diff.before.roles[role]
            assert sum(change.after_bytes for change in groups) == diff.after.roles[role]
    rounding = diff.role_difference_bytes(Role.ALLOCATOR_ROUNDING)
    assert sum(change.difference_bytes for change in diff.groups) + rounding == diff.difference_bytes
    assert sum(map(diff.role_difference_bytes, Role)) == diff.after.peak_bytes - diff.before.peak_bytes
    for side in ("before", "after"):
        blocks = sum(block.count for block in getattr(diff, side).blocks)
        assert sum(getattr(change, f"{side}_count") for change in diff.groups) == blocks


groups_of_blocks = st.lists(
    st.builds(
        group,
        st.integers(1, 100),
        st.sampled_from(["", "model.layers.0.mlp", "model.layers.1.mlp"]),
        st.sampled_from(["", "a.py:1 forward", "a.py:2 forward", "b.py:1 forward", "b.py:1 call", "MmBackward0"]),
        role=st.sampled_from([Role.ACTIVATIONS, Role.GRADIENTS, Role.LIBRARY_WORKSPACE]),
        layer=st.sampled_from([None, 0, 1]),
        count=st.integers(1, 3),
    ),
    max_size=12,
)


@given(before=groups_of_blocks, after=groups_of_blocks, rounding=st.integers(0, 9))
def test_any_two_peaks_add_up_and_swapping_them_flips_the_signs(
    before: list[BlockGroup], after: list[BlockGroup], rounding: int
) -> None:
    first, second = report(*before, rounding=rounding), report(*after)
    there, back = diff_peaks(first, second), diff_peaks(second, first)

    add_up(there)
    add_up(back)
    turned = [(c.place, c.after_bytes, c.before_bytes, c.frames_after, c.frames_before) for c in back.groups]
    forward = [(c.place, c.before_bytes, c.after_bytes, c.frames_before, c.frames_after) for c in there.groups]
    assert sorted(forward, key=repr) == sorted(turned, key=repr)


@given(blocks=groups_of_blocks)
def test_a_peak_does_not_differ_from_itself(blocks: list[BlockGroup]) -> None:
    assert all(change.difference_bytes == 0 for change in diff_peaks(report(*blocks), report(*blocks)).groups)


NAMES = ("hf-ckpt-4x1024", "liger-flce-ckpt-4x1024", "hf-4.45-ckpt-4x1024", "stamped-amp-ckpt-4x1024", "small-late")


@pytest.mark.parametrize(("before", "after"), list(itertools.pairwise(NAMES)))
def test_recordings_add_up_to_the_difference_of_their_peaks(before: str, after: str) -> None:
    add_up(diff_peaks(recorded.report(before), recorded.report(after)))


def test_the_fused_loss_saves_the_expected_bytes_and_the_weights_are_matched_layer_by_layer() -> None:
    diff = diff_peaks(recorded.report("hf-ckpt-4x1024"), recorded.report("liger-flce-ckpt-4x1024"))

    assert diff.difference_bytes == 10538196480 - 14124071936
    assert diff.role_difference_bytes(Role.CE_TEMPORARIES) == -6012 * MIB
    assert diff.groups[0].place.role is Role.CE_TEMPORARIES
    still = dict.fromkeys((Role.PARAMETERS, Role.OPTIMIZER_STATES), 0)
    layers = set()
    for change in diff.groups:
        if change.place.role in still:
            assert change.difference_bytes == 0
            still[change.place.role] += change.after_bytes
            layers.add(change.place.layer)
    assert still == {role: diff.after.roles[role] for role in still}
    assert layers == {None, *range(16)}


def moved(frames: Any) -> Any:
    """The stack in another version of the code: lines moved, classes renamed."""
    return [
        {**frame, "line": frame["line"] + 100, "name": re.sub(r"^\w+\.", "Renamed.", frame["name"])}
        if frame["filename"].endswith(".py")
        else frame
        for frame in frames
    ]


@sampled("name", ["hf-ckpt-4x1024", "stamped-amp-ckpt-4x1024"], every=2)
def test_moved_lines_change_nothing(name: str) -> None:
    snapshot = read_snapshot(recording(name))
    trace = [
        {**event, "frames": moved(event["frames"])} if "frames" in event else event for event in snapshot.trace_of(0)
    ]
    other = dataclasses.replace(snapshot, device_traces=[trace])

    diff = diff_peaks(explain(snapshot), explain(other))

    add_up(diff)
    assert diff.difference_bytes == 0
    assert {change.difference_bytes for change in diff.groups} == {0}


def test_other_addresses_change_nothing() -> None:
    snapshot = read_snapshot(recording("small-late"))
    shift = 2**40
    trace = [{**event, "addr": event["addr"] + shift} for event in snapshot.trace_of(0)]
    segments = [{**segment, "address": segment["address"] + shift} for segment in snapshot.segments]
    other = Snapshot.from_dict(
        {"segments": segments, "device_traces": [trace], "allocator_settings": snapshot.settings}
    )

    assert {change.difference_bytes for change in diff_peaks(explain(snapshot), explain(other)).groups} == {0}


def test_a_swapped_class_keeps_its_place_in_the_model() -> None:
    before = report(
        group(60, "model.layers.0.mlp", "modeling_llama.py:170 forward", layer=0),
        group(10, "model.layers.0.mlp", "MmBackward0", layer=0),
        group(5, "model.norm", "modeling_llama.py:60 forward"),
    )
    after = report(
        group(20, "model.layers.0.mlp", "liger_swiglu.py:90 apply", layer=0),
        group(10, "model.layers.0.mlp", "MmBackward0", layer=0),
        group(5, "model.norm", "rms/triton.py:99 forward"),
    )

    changes = {
        (change.place.module, change.frames_before, change.frames_after): change.difference_bytes
        for change in diff_peaks(before, after).groups
    }

    assert changes == {
        ("model.layers.0.mlp", ("modeling_llama.py:170 forward",), ("liger_swiglu.py:90 apply",)): -40,
        ("model.layers.0.mlp", ("MmBackward0",), ("MmBackward0",)): 0,
        ("model.norm", ("modeling_llama.py:60 forward",), ("rms/triton.py:99 forward",)): 0,
    }


def test_without_modules_on_one_side_layers_and_functions_decide() -> None:
    named = report(group(60, "model.layers.3.mlp", "modeling_llama.py:170 forward", layer=3))
    bare = report(group(70, "", "modeling_llama.py:175 forward", layer=3))

    diff = diff_peaks(named, bare)

    assert [change.difference_bytes for change in diff.groups] == [10]
    assert diff.notes == ("only one of the snapshots has module names: blocks are matched by role, layer and function",)


def test_notes_name_their_snapshot() -> None:
    first = dataclasses.replace(report(group(1)), notes=("it is cut",))
    assert diff_peaks(first, report(group(1))).notes == ("first snapshot: it is cut",)
