"""Roles in recordings that end within the first step: those of the whole recording, or none of a kind."""

import itertools
from collections.abc import Iterator

import numpy as np

from ligerprof.analyzers.explain.analysis import SnapshotAnalysis, analyze
from ligerprof.roles import Phase, Role
from tests.paths import PROGRAMS, RECORDINGS
from tests.sampling import sampled

# what cannot be known yet
VAGUE = {Role.ACTIVATIONS, Role.UNATTRIBUTED}
LOGITS = {Role.LOGITS, Role.SHIFT_LOGITS}
LARGEST_WRONG_SHARE = 0.004
FEWEST_EVENTS = 20
PROGRAM_NAMES = ("distillation", "double-head", "gan", "gradient-penalty", "graphed-mlp", "muon", "nanogpt-python")
PROGRAM_NAMES += ("recurrent", "selective", "vit")
RECORDING_NAMES = ("ddp-bf16-hook", "fsdp1", "fsdp2-norms", "hf-4.45-ckpt-4x1024")
PATHS = [PROGRAMS / f"{name}.pickle.xz" for name in PROGRAM_NAMES]
PATHS += [RECORDINGS / f"{name}.pickle.xz" for name in RECORDING_NAMES]


def moments_in_first_step(found: SnapshotAnalysis) -> Iterator[int]:
    """The middle and the end of the first forward pass, backward pass and optimizer step, and of what is between."""
    phases = found.attribution.phases
    bounds = [*np.flatnonzero(np.diff(phases.spans, prepend=-1)).tolist(), len(phases.spans)]
    for start, end in itertools.pairwise(bounds):
        phase = phases.shown_at(start)
        if phase is not None and end - start >= FEWEST_EVENTS:
            yield from ((start + end) // 2, end)
            if phase is Phase.OPTIMIZER:
                return


@sampled("path", PATHS, ids=lambda path: path.name.partition(".pickle")[0], every=3)
def test_roles_of_an_unfinished_first_step_are_those_of_the_whole_recording_or_vague(path: object) -> None:
    found = analyze(str(path))
    replayed, attribution = found.replayed, found.attribution

    for moment in moments_in_first_step(found):
        live = replayed.live_at(moment)
        sizes = replayed.requested_bytes[live]
        whole = attribution.roles_of(live, found.peak_moment)
        cut = attribution.until(moment).roles_of(live, moment)
        wrong = [
            known not in VAGUE and known is not role and not {known, role} <= LOGITS
            for known, role in zip(cut, whole, strict=True)
        ]
        assert sizes[wrong].sum() <= LARGEST_WRONG_SHARE * sizes.sum(), moment
