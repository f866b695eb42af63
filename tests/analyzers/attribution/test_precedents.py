"""Roles in a recording that ends within a backward pass, against the roles that the whole recording shows."""

import numpy as np
import pytest

from ligerprof.analyzers.explain.analysis import analyze
from ligerprof.roles import Phase, Role
from tests.paths import PROGRAMS, RECORDINGS

# an eager loop, a graph, which frees nothing that it captured, and wrappers that reduce gradients within backward
FIRST, LAST = 0, -1
CASES = {
    (PROGRAMS, "muon"): LAST,
    (PROGRAMS, "graphed-mlp"): LAST,
    (RECORDINGS, "fsdp1"): LAST,
    (RECORDINGS, "fsdp2-bf16-compiled"): LAST,
    # reentrant checkpointing runs backward within backward
    (RECORDINGS, "hf-4.45-ckpt-4x1024"): FIRST,
    # no optimizer step has shown yet whether the buckets hold gradients
    (RECORDINGS, "ddp-bf16-hook"): FIRST,
}


@pytest.mark.parametrize(("folder", "name"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_gradients_are_those_of_the_whole_recording(folder: object, name: str) -> None:
    found = analyze(f"{folder}/{name}.pickle.xz")
    phases, replayed, attribution = found.attribution.phases, found.replayed, found.attribution
    events = np.flatnonzero(phases.are_in(Phase.BACKWARD))
    passes = np.split(events, np.flatnonzero(np.diff(phases.spans[events])) + 1)
    chosen = [one for one in passes if len(one) > 20][CASES[folder, name]]

    for moment in (int(chosen[len(chosen) * share // 5]) for share in (1, 3)):
        live = replayed.live_at(moment)
        whole = attribution.roles_of(live, found.peak_moment)
        cut = attribution.until(moment).roles_of(live, moment)
        differ = [(a is Role.GRADIENTS) != (b is Role.GRADIENTS) for a, b in zip(whole, cut, strict=True)]
        assert replayed.requested_bytes[live][differ].sum() <= replayed.requested_bytes[live].sum() // 200
