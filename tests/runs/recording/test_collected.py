"""From the folders of processes to ranks."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ligerprof.analyzers.explain.ranks import ModuleWeights
from ligerprof.reports.run import render_run
from ligerprof.reports.terminal import console
from ligerprof.roles import Phase
from ligerprof.runs.directory import RunDirectory
from ligerprof.runs.recording.collected import CommandReport, clear_recordings, collect
from ligerprof.runs.recording.summary import RECORDING, LateFailure, LatePeak, RecordingState, RecordingSummary
from ligerprof.serialization import to_json
from ligerprof.snapshots.stamp import Stamp
from tests.torch_memory.allocator.programs import MIB, SlowAllocator

COMMAND = ("torchrun", "train.py")


def process(output: Path, pid: int, peak_mib: int, **summary: Any) -> None:
    """A folder as a recorded process leaves it; its peak is in the second step."""
    program = SlowAllocator()
    for owner, (size, step, phase) in enumerate(((1, 0, Phase.BUILD), (2, 1, Phase.FORWARD), (0, 2, Phase.FORWARD))):
        program.alloc(owner, (size or peak_mib - 3) * MIB)
        program.events[-1]["user_metadata"] = Stamp(step=step, phase=phase).to_text()
    run = RunDirectory(path=output / f"process-{pid}")
    facts = {"steps": 2, "state": RecordingState.WRITTEN, "counter_peak_bytes": peak_mib * MIB, **summary}
    run.write_json(RECORDING, to_json(RecordingSummary(pid=pid, started_us=pid, argv=("train.py",), **facts)))
    if facts["state"] is RecordingState.WRITTEN:
        run.write_snapshot(program.snapshot())


def printed(report: CommandReport) -> str:
    import io

    text = io.StringIO()
    console(text).print(render_run(report))
    return text.getvalue()


def test_a_single_process_leaves_its_files_in_the_folder_itself(tmp_path: Path) -> None:
    process(tmp_path, 12, 10)

    report = collect(tmp_path, COMMAND, 0)

    (rank,) = report.to_json()["ranks"]
    assert (rank["rank"], rank["peak_bytes"], rank["step"], rank["phase"]) == (0, 10 * MIB, 2, "forward")
    assert (rank["oom"], rank["run"], sum(rank["roles"].values())) == (None, str(tmp_path), 10 * MIB)
    assert sorted(path.name for path in tmp_path.iterdir()) == [RECORDING, "snapshot.pickle"]
    assert "The command ran 2 training steps; the peak of 10.0 MiB came in step 2." in printed(report)


def test_ranks_have_folders_and_the_worst_is_first(tmp_path: Path) -> None:
    for rank, peak_mib in enumerate((10, 30, 20)):
        process(tmp_path, 100 - rank, peak_mib, rank=rank)

    report = collect(tmp_path, COMMAND, 0)

    assert [rank["rank"] for rank in report.to_json()["ranks"]] == [1, 2, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0", "rank1", "rank2"]
    text = printed(report)
    assert "Rank 1 of 3 has the highest peak" in text
    assert "Rank 1 ran 2 training steps; the peak of 31.0 MiB came in step 2." in text


def test_processes_without_a_number_get_the_free_ones_in_order(tmp_path: Path) -> None:
    process(tmp_path, 3, 10)
    process(tmp_path, 1, 30)
    process(tmp_path, 2, 20, rank=1)

    assert [rank.peak.rank for rank in collect(tmp_path, COMMAND, 0).ranks] == [0, 1, 2]


def test_of_a_restarted_rank_the_worst_process_counts(tmp_path: Path) -> None:
    process(tmp_path, 1, 30, rank=0)
    process(tmp_path, 2, 20, rank=0, out_of_memory=True)
    process(tmp_path, 3, 10, rank=1)

    report = collect(tmp_path, COMMAND, 1)

    assert [(rank.peak.rank, rank.summary.pid) for rank in report.ranks] == [(0, 2), (1, 3)]
    assert report.notes == (f"rank 0 ran in several processes; another recording of it is in {tmp_path}/process-1",)
    assert report.ran_out


def test_processes_that_were_killed_lost_or_did_not_train_are_notes(tmp_path: Path) -> None:
    process(tmp_path, 1, 10)
    process(tmp_path, 2, 10, rank=1, state=RecordingState.RECORDING)
    process(tmp_path, 3, 10, rank=2, state=RecordingState.LOST)
    process(tmp_path, 4, 10, steps=0)

    report = collect(tmp_path, COMMAND, 0)

    assert [rank.summary.pid for rank in report.ranks] == [1]
    assert report.notes == (
        "rank 1 (process 2) was killed before it wrote its recording, in step 2",
        "rank 2 (process 3) lost its recording, in step 2",
        f"process 4 used CUDA without a training step; its recording is in {tmp_path}/process-4",
    )


def test_a_process_that_used_cuda_alone_is_shown_even_without_a_step(tmp_path: Path) -> None:
    process(tmp_path, 1, 10, steps=0)

    report = collect(tmp_path, COMMAND, 0)

    assert len(report.ranks) == 1
    assert "The command ran no training step." in printed(report)


def test_what_followed_the_recorded_steps_is_noted(tmp_path: Path) -> None:
    late = {
        "last_recorded": 2,
        "late_peak": LatePeak(peak_bytes=50 * MIB, step=7, first_step=5),
        "late_failure": LateFailure(requested_bytes=5, allocated_bytes=40 * MIB, step=9),
        "out_of_memory": True,
    }
    process(tmp_path, 1, 10, **late)

    report = collect(tmp_path, COMMAND, 1)

    assert report.notes == (
        "one of steps 5 to 7 reached a higher peak, 50.0 MiB; --steps 5:7 records it",
        "memory ran out in step 9, after the recorded steps, with 40.0 MiB allocated; --steps 9 records it",
    )
    oom = report.to_json()["ranks"][0]["oom"]
    assert (oom["requested_bytes"], oom["allocated_bytes"], oom["step"]) == (5, 40 * MIB, 9)
    assert sum(oom["roles"].values()) == oom["allocated_bytes"]
    assert report.ran_out
    assert not replace(report, exit_code=0).ran_out


def test_damaged_files_are_notes(tmp_path: Path) -> None:
    process(tmp_path, 1, 10)
    process(tmp_path, 2, 10, rank=1)
    process(tmp_path, 3, 10, rank=2)
    (tmp_path / "process-1" / RECORDING).write_text('{"pid": 1}')
    (tmp_path / "process-2" / "snapshot.pickle").write_bytes(pickle.dumps({"nothing": 1}))

    report = collect(tmp_path, COMMAND, 0)

    assert [rank.peak.rank for rank in report.ranks] == [2]
    assert [note.partition(":")[0] for note in report.notes] == [
        str(tmp_path / "process-1" / RECORDING),
        "rank 1 cannot be explained",
    ]


def test_a_cleared_folder_keeps_what_is_not_a_recording(tmp_path: Path) -> None:
    for pid in (1, 2):
        process(tmp_path, pid, 10, rank=pid)
    collect(tmp_path, COMMAND, 0)
    (tmp_path / "rank9").mkdir()
    (tmp_path / "rank9" / "mine.txt").write_text("")

    clear_recordings(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["rank9"]


@pytest.mark.parametrize("field", [field for field in RecordingSummary.__slots__ if field not in ("pid", "schema")])
def test_a_summary_survives_its_file(field: str) -> None:
    values: dict[str, Any] = {
        "started_us": 5,
        "argv": ("python", "train.py"),
        "rank": 3,
        "state": RecordingState.LOST,
        "late_peak": LatePeak(peak_bytes=1, step=2, first_step=1),
        "late_failure": LateFailure(requested_bytes=1, allocated_bytes=2, step=3),
        "notes": ("one",),
        "weights": {"layers.*.mlp": ModuleWeights(2, 7)},
        "models": ({"name": "Llama", "role": "policy", "phases": ["forward"]},),
        "out_of_memory": True,
    }
    summary = RecordingSummary(**{"pid": 1, "started_us": 0, "argv": (), field: values.get(field, 7)})

    assert RecordingSummary.from_json(to_json(summary)) == summary
