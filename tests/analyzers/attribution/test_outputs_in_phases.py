from ligerprof.analyzers.explain.analysis import analyze
from ligerprof.roles import Phase
from ligerprof.snapshots.reader import Snapshot
from ligerprof.snapshots.stamp import Stamp
from tests.torch_memory.allocator.programs import MIB, SlowAllocator

LOGITS, PROBABILITIES, SMALL, BATCH, LATER = range(5)


def test_what_a_script_computes_from_outputs_belongs_to_the_model_that_made_them() -> None:
    allocator = SlowAllocator()
    phases: list[Phase] = []

    def note(phase: Phase) -> None:
        for event in allocator.events[len(phases) :]:
            event["user_metadata"] = Stamp(step=1, phase=phase).to_text()
            event["frames"] = []
            phases.append(phase)

    allocator.alloc(LOGITS, 64 * MIB)
    note(Phase.SCORING)
    allocator.alloc(PROBABILITIES, 128 * MIB)
    allocator.alloc(SMALL, MIB)
    allocator.request_free(PROBABILITIES)
    allocator.complete_free(PROBABILITIES)
    note(Phase.OUTSIDE)
    after_use = len(phases)
    allocator.request_free(LOGITS)
    allocator.complete_free(LOGITS)
    note(Phase.OUTSIDE)
    freed = len(phases)
    allocator.alloc(BATCH, 2 * MIB)
    note(Phase.OUTSIDE)
    allocator.alloc(LATER, 4 * MIB)
    note(Phase.FORWARD)

    taken = {**allocator.snapshot(), "device_traces": [allocator.events]}
    analysis = analyze(Snapshot.from_dict(taken))

    shown = analysis.attribution.phases.shown_at
    assert {shown(event) for event in range(after_use)} == {Phase.SCORING}
    assert shown(after_use) is Phase.SCORING
    # the small block is not what the model's outputs became
    assert shown(freed) is Phase.OUTSIDE
    assert analysis.peak.peak_phase is Phase.SCORING
    assert analysis.peak.phases[Phase.SCORING] == analysis.peak.peak_bytes == (64 + 128) * MIB + MIB
