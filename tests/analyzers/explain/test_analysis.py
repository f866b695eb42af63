import copy
import lzma
import pickle
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ligerprof.analyzers.explain import analysis
from ligerprof.analyzers.explain.analysis import explain
from ligerprof.analyzers.explain.peak import PeakReport
from ligerprof.errors import LigerprofError, SnapshotFormatError
from ligerprof.roles import STEP_PHASES, Phase, Role
from ligerprof.snapshots.reader import Snapshot, read_snapshot
from ligerprof.snapshots.stamp import Stamp
from tests import recorded
from tests.paths import DATA, RECORDINGS
from tests.recorded import report
from tests.sampling import sampled
from tests.torch_memory.allocator.programs import MIB, SlowAllocator, random_program

NAMES = (
    "hf-ckpt-4x1024",
    "liger-flce-ckpt-4x1024",
    "hf-nockpt-8x1024",
    "hf-4.45-ckpt-4x1024",
    "zero3-offload-4x1024",
)
# torch.cuda.max_memory_allocated() within forward, backward and optimizer of the recorded run
MEASURED_PHASES = {
    "hf-ckpt-4x1024": (13073464832, 14124071936, 9955830272),
    "liger-flce-ckpt-4x1024": (8397163008, 10538196480, 9957927424),
    "hf-nockpt-8x1024": (32369408512, 34470623232, 12428465664),
    "hf-4.45-ckpt-4x1024": (14120016896, 14117932032, 9956108800),
}


def add_up(report: PeakReport) -> None:
    assert report.roles.total_bytes == report.peak_bytes
    for role in Role:
        blocks = sum(block.size_bytes for block in report.blocks if block.role is role)
        assert blocks == (0 if role is Role.ALLOCATOR_ROUNDING else report.roles[role])
    assert report.roles[Role.ALLOCATOR_ROUNDING] >= 0


@pytest.fixture(scope="module", params=NAMES)
def recording(request: pytest.FixtureRequest) -> tuple[str, PeakReport]:
    return request.param, report(request.param)


def test_roles_of_recordings_add_up_and_little_is_unattributed(recording: tuple[str, PeakReport]) -> None:
    _, report = recording

    add_up(report)
    assert report.complete
    assert report.notes == ()
    assert report.roles[Role.UNATTRIBUTED] < 0.02 * report.peak_bytes


@pytest.mark.parametrize("name", sorted(MEASURED_PHASES))
def test_phases_of_recordings_are_the_measured_ones(name: str) -> None:
    phases = report(name).phases

    assert tuple(phases[phase] for phase in STEP_PHASES) == MEASURED_PHASES[name]


def program_with_stamps() -> SlowAllocator:
    """Two steps: a weight and its state stay; the second step's activation is larger."""
    program = SlowAllocator()

    def stamped(step: int, phase: Phase, work: Any, module: str = "", node: str = "") -> None:
        first = len(program.events)
        work()
        text = Stamp(step=step, phase=phase, module=module, node=node).to_text()
        for event in program.events[first:]:
            event["user_metadata"] = text

    def free(owner: int) -> None:
        program.request_free(owner)
        program.complete_free(owner)

    stamped(0, Phase.BUILD, lambda: program.alloc(1, 4 * MIB))
    for step, activation in ((1, 30 * MIB), (2, 7 * MIB)):
        base = 10 * step
        stamped(step, Phase.FORWARD, lambda a=activation, b=base: program.alloc(b, a), "model.layers.3.mlp")
        stamped(step, Phase.BACKWARD, lambda b=base: program.alloc(b + 1, 4 * MIB), "model.layers.3.mlp", "MmBackward0")
        stamped(step, Phase.BACKWARD, lambda b=base: free(b))
        if step == 1:
            stamped(step, Phase.OPTIMIZER, lambda: program.alloc(2, 8 * MIB))
        stamped(step, Phase.OPTIMIZER, lambda b=base: program.alloc(b + 2, 2 * MIB))
        stamped(step, Phase.OPTIMIZER, lambda b=base: free(b + 2))
        stamped(step, Phase.OUTSIDE, lambda b=base: free(b + 1))
    return program


def test_step_restricts_the_peak_to_the_stamped_step() -> None:
    report = explain(Snapshot.from_dict(program_with_stamps().snapshot()), step=2)

    add_up(report)
    assert report.peak_bytes == (4 + 8 + 7 + 4) * MIB
    assert report.peak_phase is Phase.BACKWARD
    assert report.phases == {
        Phase.FORWARD: 19 * MIB,
        Phase.BACKWARD: 23 * MIB,
        Phase.OPTIMIZER: 18 * MIB,
    }
    assert {role: size for role, size in report.roles.roles.items() if size} == {
        Role.PARAMETERS: 4 * MIB,
        Role.OPTIMIZER_STATES: 8 * MIB,
        Role.ACTIVATIONS: 7 * MIB,
        Role.GRADIENTS: 4 * MIB,
    }
    gradient = next(block for block in report.blocks if block.role is Role.GRADIENTS)
    assert (gradient.module, gradient.layer, gradient.frame) == ("model.layers.3.mlp", 3, "MmBackward0")


@pytest.mark.parametrize("more_bytes", [0, 2 * MIB])
def test_the_peak_of_steps_with_calls_is_explained_and_a_higher_one_is_named(more_bytes: int) -> None:
    program, weights = SlowAllocator(), 4 * MIB
    moments = []
    for step, module, size_bytes in (
        (1, "", weights + more_bytes),
        (2, "model.layers.0.mlp", weights),
        (3, "model.layers.0.mlp", weights),
    ):
        for phase, work in (
            (Phase.FORWARD, lambda step=step, size_bytes=size_bytes: program.alloc(step, size_bytes)),
            (Phase.OUTSIDE, lambda step=step: (program.request_free(step), program.complete_free(step))),
        ):
            first = len(program.events)
            work()
            for event in program.events[first:]:
                event["user_metadata"] = Stamp(step=step, phase=phase, module=module).to_text()
            if phase is Phase.FORWARD:
                moments.append(len(program.events))

    found = analysis.analyze(Snapshot.from_dict(program.snapshot()))

    assert found.peak_moment == moments[1]
    named = [note for note in found.peak.notes if "--steps" in note]
    assert named == (["step 1 reached a higher peak, 6.0 MiB; --steps 1 records its stacks"] if more_bytes else [])


def test_steps_whose_calls_were_not_recorded_get_their_true_roles_or_none() -> None:
    name = "stamped-amp-ckpt-4x1024"
    values = pickle.loads(lzma.decompress((RECORDINGS / f"{name}.pickle.xz").read_bytes()))
    (trace,) = filter(None, values["device_traces"])
    for event in trace:
        stamp = Stamp.parse(event["user_metadata"])
        if stamp is not None and stamp.step == 2:
            event["frames"] = []
            event["user_metadata"] = Stamp(step=2, phase=stamp.phase).to_text()

    found, known = analysis.analyze(Snapshot.from_dict(values), step=2), recorded.analysis(name)

    add_up(found.peak)
    for moment in (found.peak_moment, *range(found.peak_moment - 4000, len(trace), 1000)):
        live = found.replayed.live_at(moment)
        pairs = Counter(zip(*(each.attribution.roles_of(live, moment) for each in (found, known)), strict=True))
        assert all(now in (Role.UNATTRIBUTED, before) for now, before in pairs), pairs
    assert found.peak.roles[Role.UNATTRIBUTED] > 0
    assert found.peak.roles[Role.PARAMETERS] == known.peak.roles[Role.PARAMETERS]


def test_without_a_step_the_whole_trace_counts() -> None:
    assert explain(Snapshot.from_dict(program_with_stamps().snapshot())).peak_bytes == 38 * MIB


def test_missing_step_is_an_error() -> None:
    snapshot = Snapshot.from_dict(program_with_stamps().snapshot())
    with pytest.raises(SnapshotFormatError, match="no event of step 9"):
        explain(snapshot, step=9)
    with pytest.raises(SnapshotFormatError, match="no steps"):
        explain(Snapshot.from_dict(random_program(1).snapshot()), step=1)


def two_devices() -> dict[str, Any]:
    low, high = random_program(1), random_program(2, events=300)
    values = low.snapshot()
    second = high.snapshot()
    for segment in second["segments"]:
        segment["device"] = 1
    values["segments"] += second["segments"]
    values["device_traces"] += second["device_traces"]
    return values


def test_a_stamp_whose_step_has_too_many_digits_is_none() -> None:
    values = program_with_stamps().snapshot()
    values["device_traces"][0][0]["user_metadata"] = f"ligerprof;{'9' * 5000};forward;;"

    assert explain(Snapshot.from_dict(values)).peak_bytes == 38 * MIB


def test_all_results_come_from_one_replay_and_one_attribution(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Counter[str] = Counter()
    for name in ("replay", "Attribution"):
        original = getattr(analysis, name)

        def counted(*given: Any, made_by: Any = original, name: str = name, **named: Any) -> Any:
            made[name] += 1
            return made_by(*given, **named)

        monkeypatch.setattr(analysis, name, counted)

    analyzed = analysis.analyze(read_snapshot(RECORDINGS / "stamped-oom.pickle.xz"))

    assert analyzed.peak.out_of_memory is analyzed.out_of_memory is not None
    assert analyzed.timeline.allocated_bytes.max() == analyzed.peak.peak_bytes
    assert analyzed.timeline is analyzed.timeline
    assert made == {"replay": 1, "Attribution": 1}


def test_highest_device_is_taken_and_the_others_are_named() -> None:
    report = explain(Snapshot.from_dict(two_devices()))

    assert report.device == 1
    assert report.peak_bytes == max(random_program(2, events=300).allocated)
    assert "device 0 peaks at" in report.notes[0]


def test_device_index_takes_that_device_and_no_other() -> None:
    snapshot = Snapshot.from_dict(two_devices())

    assert explain(snapshot, device_index=0).peak_bytes == max(random_program(1).allocated)
    with pytest.raises(SnapshotFormatError, match=r"has no device 5, only 0, 1"):
        explain(snapshot, device_index=5)


def test_only_second_device_used_is_found() -> None:
    values = two_devices()
    values["segments"] = [segment for segment in values["segments"] if segment["device"] == 1]
    values["device_traces"][0] = []

    report = explain(Snapshot.from_dict(values))

    assert (report.device, [note for note in report.notes if "device" in note]) == (1, [])


def test_truncated_recording_reports_older_memory() -> None:
    snapshot = read_snapshot(RECORDINGS / "hf-nockpt-8x1024.pickle.xz")
    cut = Snapshot.from_dict({"segments": snapshot.segments, "device_traces": [list(snapshot.trace_of(0)[-5000:])]})

    report = explain(cut)

    add_up(report)
    assert not report.complete
    assert report.peak_bytes == 34470623232
    assert "does not reach back to an empty device" in report.notes[0]


def test_run_directory_is_read_by_its_snapshot(tmp_path: Path) -> None:
    program = random_program(4)
    (tmp_path / "snapshot.pickle").write_bytes(pickle.dumps(program.snapshot()))

    assert explain(tmp_path).peak_bytes == max(program.allocated)
    assert explain(str(tmp_path)).peak_bytes == max(program.allocated)


def test_snapshot_of_nothing_is_an_error() -> None:
    with pytest.raises(SnapshotFormatError, match="history switched on"):
        explain(Snapshot.from_dict({"segments": [], "device_traces": [[]]}))


def slices_of_recordings() -> list[dict[str, Any]]:
    values = []
    for name in ("hf-4.45-ckpt-4x1024", "zero3-offload-4x1024"):
        snapshot = read_snapshot(RECORDINGS / f"{name}.pickle.xz")
        values.append(
            {
                "segments": list(snapshot.segments),
                "device_traces": [list(snapshot.trace_of(0)[-150:])],
                "allocator_settings": dict(snapshot.settings),
                "external_annotations": list(snapshot.annotations[-8:]),
            }
        )
    return [*values, program_with_stamps().snapshot(), random_program(8, expandable=True).snapshot(drop=20)]


ODD_VALUES: tuple[Any, ...] = (None, -1, 0, 2**64, 2**100, 1.5, "", "x", [], {}, [None], True, float("nan"), (0, 1))


def harm(values: Any, draw: random.Random) -> None:
    """Change, drop or repeat a random value."""
    place = values
    while isinstance(place, (dict, list)) and place:
        key = draw.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if draw.random() < 0.3 or not isinstance(place[key], (dict, list)) or not place[key]:
            change = draw.random()
            if change < 0.5:
                place[key] = draw.choice(ODD_VALUES)
            elif change < 0.75:
                del place[key]
            elif isinstance(place, list):
                place.insert(key, copy.deepcopy(place[draw.randrange(len(place))]))
            return
        place = place[key]


@sampled("kind", range(4), every=4)
def test_damaged_structures_give_a_report_that_adds_up_or_one_error(kind: int) -> None:
    whole = pickle.dumps(slices_of_recordings()[kind])
    draw = random.Random(kind)
    reports, messages = 0, []
    for _ in range(60):
        values = pickle.loads(whole)
        for _ in range(draw.choice([1, 1, 2, 5])):
            harm(values, draw)
        try:
            report = explain(Snapshot.from_dict(values))
        except LigerprofError as error:
            messages.append(str(error))
        else:
            reports += 1
            assert report.roles.total_bytes == report.peak_bytes
    assert reports
    assert not any("\n" in message for message in messages)


def test_steps_without_stacks_do_not_bound_what_suggestions_save() -> None:
    recording = RECORDINGS.parent / "recorder" / "three-steps.pickle.xz"
    values = pickle.loads(lzma.decompress(recording.read_bytes()))
    whole = analysis.analyze(Snapshot.from_dict(values)).peak
    # as the steps before the chosen ones are recorded
    for event in values["device_traces"][0]:
        stamp = Stamp.parse(event.get("user_metadata") or "")
        if stamp is not None and stamp.step == 2:
            event.update(frames=[], user_metadata=Stamp(step=2, phase=stamp.phase).to_text())

    chosen = analysis.analyze(Snapshot.from_dict(values)).peak

    assert (whole.peak_step, chosen.peak_step, chosen.peak_bytes) == (2, 3, whole.peak_bytes)
    assert [(each.name, each.saves_bytes) for each in chosen.suggestions] == [
        (each.name, each.saves_bytes) for each in whole.suggestions
    ]
    assert "half-batch" in {each.name for each in chosen.suggestions}


def test_more_allocated_than_reserved_is_said_to_be_damage() -> None:
    damaged = explain(DATA / "hostile" / "reserved-below-peak.pickle.xz")

    assert damaged.reserved_bytes < damaged.peak_bytes
    notes = [note for note in damaged.notes if note.startswith("the file is damaged: after 278 events, 15.95 GiB")]
    assert len(notes) == 1
