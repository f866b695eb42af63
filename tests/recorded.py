"""Analyses of the recordings in tests/data/snapshots, made once per process: they are read and never changed."""

import functools

from ligerprof.analyzers.explain.analysis import SnapshotAnalysis, analyze
from ligerprof.analyzers.explain.peak import PeakReport
from tests.paths import RECORDINGS


# an analysis holds all events of its recording, so the latest few are kept
@functools.lru_cache(maxsize=8)
def analysis(name: str) -> SnapshotAnalysis:
    return analyze(RECORDINGS / f"{name}.pickle.xz")


@functools.cache
def report(name: str) -> PeakReport:
    return analysis(name).peak
