"""Analyses of the recordings in tests/data, made once per process: they are read and never changed."""

import functools
import lzma
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from ligerprof.analyzers.attribution.phases import phase_code
from ligerprof.analyzers.explain import analysis as explained
from ligerprof.analyzers.explain.analysis import SnapshotAnalysis
from ligerprof.analyzers.explain.peak import PeakReport
from ligerprof.roles import Phase
from ligerprof.snapshots.reader import Snapshot
from tests.paths import DATA, RECORDINGS

_analyze = explained.analyze


# an analysis holds all events of its recording, so the latest few are kept
@functools.lru_cache(maxsize=8)
def _known(path: str, stacks: bool) -> SnapshotAnalysis:
    return _analyze(path, stacks=stacks)


@functools.wraps(_analyze)
def analyze(source: str | Path | Snapshot, *, stacks: bool = False, **options: Any) -> SnapshotAnalysis:
    chosen = options.pop("device_index", None)
    if chosen is not None or any(options.values()) or not is_recording(source):
        return _analyze(source, device_index=chosen, stacks=stacks, **options)
    return _known(str(source), stacks)


def is_recording(source: object) -> bool:
    return isinstance(source, (str, Path)) and Path(source).is_relative_to(DATA) and Path(source).is_file()


def share() -> None:
    """Let commands and functions that are imported from now on share analyses."""
    explained.analyze = analyze


def analysis(name: str) -> SnapshotAnalysis:
    return analyze(RECORDINGS / f"{name}.pickle.xz")


@functools.cache
def report(name: str) -> PeakReport:
    return analysis(name).peak


def begun_at(path: Path, phase: Phase, number: int) -> Snapshot:
    """A recording from the n-th span of a phase on, whose older blocks have no stacks."""
    whole = analyze(path)
    phases, device = whole.attribution.phases, whole.replayed.device
    starts = np.flatnonzero(np.diff(phases.spans, prepend=-1))
    first = int(starts[phases.codes[starts] == phase_code(phase)][number])
    with lzma.open(path) as file:
        snapshot: dict[str, Any] = pickle.load(file)
    snapshot["device_traces"][device] = snapshot["device_traces"][device][first:]
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            block.pop("frames", None)
    return Snapshot.from_dict(snapshot)
