"""The sentences that say why memory is unattributed."""

import pytest

from ligerprof.analyzers.explain.analysis import SnapshotAnalysis, analyze
from ligerprof.roles import Phase, Role
from ligerprof.units import format_bytes
from tests import recorded
from tests.paths import PROGRAMS, RECORDINGS
from tests.recorded import begun_at


def reasons(found: SnapshotAnalysis) -> list[str]:
    return [note for note in found.peak.notes if "unattributed" in note]


def test_weights_of_a_model_that_an_earlier_program_kept_are_named_by_their_place() -> None:
    found = analyze(RECORDINGS / "oom-optimizer.pickle.xz")
    assert found.out_of_memory is not None
    size = format_bytes(found.out_of_memory.roles[Role.OTHER])

    assert not reasons(found)
    assert f"{size} belong to models that the process built earlier, which nothing runs any more" in found.peak.notes


def test_a_late_recording_says_how_much_of_the_older_memory_is_weights() -> None:
    whole = analyze(PROGRAMS / "vit.pickle.xz")
    found = analyze(begun_at(PROGRAMS / "vit.pickle.xz", Phase.FORWARD, 1)).peak
    older = found.roles[Role.UNATTRIBUTED]

    (reason,) = [note for note in found.notes if "unattributed" in note]

    weights, states = (format_bytes(whole.peak.roles[role]) for role in (Role.PARAMETERS, Role.OPTIMIZER_STATES))
    assert reason == (
        f"{format_bytes(older)} are unattributed: allocated before the recording began, so that it has no stacks of "
        f"them; {weights} of them are weights, and {states} are blocks of the same sizes, such as an optimizer's states"
    )


@pytest.mark.parametrize("name", ["hf-nockpt-8x1024", "small-oom"])
def test_a_recording_without_unattributed_memory_has_no_such_sentence(name: str) -> None:
    assert reasons(recorded.analysis(name)) == []
