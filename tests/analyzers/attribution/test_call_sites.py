"""Call sites are shared by the steps of a program, and bounded."""

from typing import Any

import pytest

from ligerprof.analyzers.attribution import stacks as call_sites
from ligerprof.analyzers.explain.analysis import analyze
from ligerprof.snapshots.reader import Snapshot


def stamped(stamps: list[str]) -> Snapshot:
    """One block per stamp."""
    start = {"action": "segment_alloc", "addr": 2**30, "size": 2**21}
    allocs: list[dict[str, Any]] = [
        {"action": "alloc", "addr": 2**30 + 512 * index, "size": 512, "user_metadata": stamp}
        for index, stamp in enumerate(stamps)
    ]
    return Snapshot.from_dict({"device_traces": [[start, *allocs]]})


def test_the_same_module_in_each_step_is_one_call_site() -> None:
    analysis = analyze(stamped([f"ligerprof;{step};forward;layers.{step % 2};" for step in range(1, 9)]))

    assert [site.module for site in analysis.attribution.call_sites.sites] == ["layers.1", "layers.0"]


def test_more_call_sites_than_programs_have_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_sites, "_MOST_SITES", 5)

    report = analyze(stamped([f"ligerprof;1;forward;layers.{index};" for index in range(9)])).peak

    assert {block.module: block.count for block in report.blocks}[""] == 4
    assert report.roles.total_bytes == report.peak_bytes
    assert "more than 5 call sites; the stacks and modules of the others are left out" in report.notes
