"""A process that records itself, however it ends; the device takes the place of CUDA."""

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ligerprof.analyzers.explain.analysis import analyze, explain
from ligerprof.roles import Phase, Role
from ligerprof.runs.recording import parts, process
from ligerprof.runs.recording.process import ProcessRecording
from ligerprof.runs.recording.record import Failure
from ligerprof.runs.recording.settings import Mode, Settings, Steps
from ligerprof.runs.recording.summary import RecordingState, RecordingSummary, read_summary
from ligerprof.snapshots.reader import read_snapshot
from tests.runs.recording.operations import OperationHistory


class Exits:
    """What a process arranges for its end."""

    def register(self, function: Callable[[], None]) -> None:
        # modules that are imported meanwhile register functions of their own
        if isinstance(getattr(function, "__self__", None), ProcessRecording):
            self.registered.append(function)

    def __init__(self) -> None:
        self.registered: list[Callable[[], None]] = []
        self.in_child: list[Callable[[], None]] = []
        self.status: int | None = None
        self.killed: list[int] = []


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Exits]:
    found = Exits()
    monkeypatch.setattr(process.atexit, "register", found.register)
    monkeypatch.setattr(process.os, "register_at_fork", lambda *, after_in_child: found.in_child.append(after_in_child))
    monkeypatch.setattr(process.os, "_exit", lambda status: setattr(found, "status", status))
    monkeypatch.setattr(process.os, "kill", lambda _pid, number: found.killed.append(number))
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield found
    signal.signal(signal.SIGTERM, before)


ALL = Steps()


def start(folder: Path, steps: Steps = ALL, fails_at: int | None = None) -> tuple[ProcessRecording, OperationHistory]:
    history = OperationHistory(fails_at=fails_at)
    recording = ProcessRecording(Settings(mode=Mode.RUN, output=folder, steps=steps), history)
    recording.start()
    return recording, history


def train(steps: int = 3) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def written(folder: Path) -> tuple[Path, RecordingSummary]:
    (run,) = folder.iterdir()
    return run, read_summary(run)


def test_a_process_writes_its_recording_at_its_end_once(tmp_path: Path, exits: Exits) -> None:
    _recording, history = start(tmp_path)
    assert written(tmp_path)[1].state is RecordingState.RECORDING
    with history:
        train()
    (finish,) = exits.registered

    finish()
    run, summary = written(tmp_path)
    when = (run / "snapshot.pickle").stat().st_mtime_ns
    finish()

    assert (run / "snapshot.pickle").stat().st_mtime_ns == when
    assert (summary.state, summary.steps, summary.last_recorded) == (RecordingState.WRITTEN, 3, None)
    assert summary.counter_peak_bytes == explain(run).peak_bytes
    assert history.started is None


@pytest.mark.parametrize("way", ["_exit", "SIGTERM"])
def test_a_process_that_leaves_at_once_writes_first(way: str, tmp_path: Path, exits: Exits) -> None:
    _, history = start(tmp_path)
    with history:
        train()

    if way == "_exit":
        os._exit(7)
        assert exits.status == 7
    else:
        signal.getsignal(signal.SIGTERM)(signal.SIGTERM, None)
        assert exits.killed == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert written(tmp_path)[1].state is RecordingState.WRITTEN


def test_a_program_that_handles_sigterm_keeps_its_handler(tmp_path: Path, exits: Exits) -> None:
    own: Any = lambda *_arguments: None  # noqa: E731
    signal.signal(signal.SIGTERM, own)
    recording, _ = start(tmp_path)
    assert signal.getsignal(signal.SIGTERM) is own
    recording.finish()


def test_a_forked_child_takes_the_hooks_out_and_writes_nothing(
    tmp_path: Path, exits: Exits, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, save = nn.Module.__call__, torch.save
    start(tmp_path)
    assert nn.Module.__call__ is not call
    (leave,) = exits.in_child
    run, _ = written(tmp_path)
    monkeypatch.setattr(process.os, "getpid", lambda: -1)

    leave()
    for finish in exits.registered:
        finish()

    assert (nn.Module.__call__, torch.save) == (call, save)
    assert not (run / "snapshot.pickle").exists()


@pytest.fixture(params=[True, False], ids=["each step", "several steps at once"])
def is_read_each_step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether torch's counter is read in each step without events."""
    monkeypatch.setattr(process, "_SECONDS_BETWEEN_READS", 0 if request.param else 1e9)
    return bool(request.param)


def test_recording_ends_with_the_chosen_steps_and_then_only_counts(
    tmp_path: Path, exits: Exits, is_read_each_step: bool
) -> None:
    call = nn.Module.__call__
    recording, history = start(tmp_path, Steps(first=2, last=3))
    with history:
        train(3)
        assert history.started is not None
        train(1)
        run, summary = written(tmp_path)
        assert (summary.state, summary.steps, summary.last_recorded) == (RecordingState.WRITTEN, 4, 3)
        assert (history.started, nn.Module.__call__) == (None, call)
        # the counter rises in a step that is not recorded
        history.program.alloc(-1, 2**24)
        train(2)
    recording.finish()

    run, summary = written(tmp_path)
    assert summary.late_peak is not None
    assert summary.late_peak.peak_bytes == history.peak_bytes()
    # after the update of step 4, and before that of step 5
    assert str(summary.late_peak.steps) == ("4:5" if is_read_each_step else "4:6")
    assert {step.step for step in explain(run).steps} == {1, 2, 3}


def test_an_optimizer_that_updates_groups_one_after_another_is_one_step(tmp_path: Path, exits: Exits) -> None:
    recording, history = start(tmp_path, Steps(first=1, last=2))
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with history:
        for _ in range(5):
            model(torch.ones(2, 4)).sum().backward()
            for _group in range(3):
                optimizer.step()
    recording.finish()

    _, summary = written(tmp_path)
    assert (summary.steps, summary.last_recorded) == (5, 2)


def test_a_peak_before_the_chosen_steps_is_noted_and_the_replay_goes_on(
    tmp_path: Path, exits: Exits, is_read_each_step: bool
) -> None:
    recording, history = start(tmp_path, Steps(first=7, last=8))
    with history:
        train(3)
        # while the history is off
        history.program.alloc(-1, 2**24)
        train(1)
        history.program.request_free(-1)
        history.program.complete_free(-1)
        history.program.alloc(-2, 2**20)
        train(5)
    recording.finish()

    run, summary = written(tmp_path)
    assert (summary.steps, summary.last_recorded) == (9, 8)
    assert summary.late_peak is not None
    assert summary.late_peak.peak_bytes == history.peak_bytes()
    # between steps 3 and 4
    assert str(summary.late_peak.steps) == ("3" if is_read_each_step else "2:5")
    found = analyze(read_snapshot(run))
    assert (found.replayed.verified, found.replayed.complete, found.replayed.mismatches) == (True, True, 0)
    assert {1, 6, 7, 8} <= {step.step for step in found.peak.steps}
    assert found.peak.roles[Role.UNATTRIBUTED] >= 2**20


def test_memory_that_runs_out_before_the_chosen_steps_is_explained(tmp_path: Path, exits: Exits) -> None:
    recording, history = start(tmp_path, Steps(first=7))
    with history:
        train(3)
        history.program.alloc(-1, 2**24)
        history.last_failure = Failure(2**30, 2**24, 0, 2**29)
        for observer in history.observers:
            observer()
    run, summary = written(tmp_path)
    assert summary.out_of_memory
    failed = analyze(read_snapshot(run)).peak.out_of_memory
    assert failed is not None
    assert (failed.requested_bytes, failed.allocated_bytes) == (2**30, 2**24)
    recording.finish()


def in_parts(monkeypatch: pytest.MonkeyPatch, least_events: int, most_events: int) -> None:
    """Make a recording long at 150 events, and its parts of so many."""
    monkeypatch.setattr(parts, "_SECONDS_BETWEEN_CHECKS", 0)
    monkeypatch.setattr(parts, "_LEAST_EVENTS_OF_PART", least_events)
    monkeypatch.setattr(parts, "_MOST_EVENTS_OF_PART", most_events)
    monkeypatch.setattr(parts, "_MOST_EVENTS", 150)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_main_memory_is_that_of_the_process_and_not_of_the_one_that_started_it() -> None:
    held = bytearray(2**30)
    code = "from ligerprof.runs.recording.process import _main_memory; print(_main_memory()[0])"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert 2**24 < int(printed) < len(held)


def test_a_long_recording_has_its_peak_and_the_weights_that_it_lost_the_events_of(
    tmp_path: Path, exits: Exits, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_parts(monkeypatch, 30, 60)
    recording, history = start(tmp_path)
    with history:
        model = nn.Linear(4, 4)
        # other threads, as those that load weights, have no stamp
        weights = [history.hold(4 * 2**20, has_stamp=has_stamp) for has_stamp in (True, False, False)]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(12):
            model(torch.ones(2, 4)).sum().backward()
            if step == 8:
                history.release_held(history.hold(64 * 2**20))
            optimizer.step()
    recording.finish()

    run, summary = written(tmp_path)
    report = explain(run)
    assert (report.peak_bytes, report.peak_step) == (summary.counter_peak_bytes, 9)
    assert report.complete
    assert report.roles.roles[Role.PARAMETERS] == len(weights) * 4 * 2**20
    assert not (run / "parts").exists()
    assert summary.last_recorded is not None
    assert summary.notes[0].startswith("the recording is long: it has the events around the peak, of steps ")
    # whole steps alone, and the one of the peak among them
    steps = [each.step for each in report.steps]
    assert 1 not in steps
    assert 9 in steps


class Policy(nn.Linear):
    """Generates if it is asked for a cache."""

    def forward(self, x: torch.Tensor, *, use_cache: bool = False) -> torch.Tensor:
        return super().forward(x)


def test_a_long_recording_counts_what_scoring_reached_in_steps_that_it_leaves_out(
    tmp_path: Path, exits: Exits, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_parts(monkeypatch, 3, 3)
    recording, history = start(tmp_path)

    def score(*_: object) -> None:
        history.release_held(history.hold(16 * 2**20 if step == 10 else 2**20))

    with history:
        model, reference = Policy(4, 4), nn.Linear(4, 4).eval()
        reference.register_forward_hook(score)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(12):
            with torch.no_grad():
                model(torch.ones(2, 4), use_cache=True)
                reference(torch.ones(2, 4))
            model(torch.ones(2, 4)).sum().backward()
            if step == 2:
                history.release_held(history.hold(64 * 2**20))
            optimizer.step()
    recording.finish()

    report = explain(written(tmp_path)[0])
    assert report.peak_step == 3
    assert 16 * 2**20 <= report.phases[Phase.SCORING] < 32 * 2**20


def test_memory_that_runs_out_is_written_at_once_and_noted_after_the_recorded_steps(
    tmp_path: Path, exits: Exits
) -> None:
    _, history = start(tmp_path, fails_at=20)
    with history, pytest.raises(torch.OutOfMemoryError):
        train()
    run, summary = written(tmp_path)
    assert summary.out_of_memory
    assert pickle.loads((run / "snapshot.pickle").read_bytes())["device_traces"][0]
    exits.registered[0]()

    later = tmp_path / "later"
    recording, history = start(later, Steps(last=1))
    with history:
        train(3)
    history.last_failure = Failure(5, 7)
    for observer in history.observers:
        observer()
    _, summary = written(later)
    assert summary.late_failure is not None
    failure = summary.late_failure
    assert (failure.requested_bytes, failure.allocated_bytes, failure.step) == (5, 7, 4)
    recording.finish()


def test_a_full_disk_loses_the_recording_and_not_the_training(
    tmp_path: Path, exits: Exits, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, history = start(tmp_path)
    with history:
        train()
    run, _ = written(tmp_path)
    (run / "snapshot.pickle").mkdir()

    recording.finish()

    assert "ligerprof: the recording is lost: " in capsys.readouterr().err
    assert written(tmp_path)[1].state is RecordingState.LOST
    assert history.started is None
